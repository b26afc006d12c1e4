"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interposer.errors import ConfigError

if TYPE_CHECKING:
    from interposer_models._language_model import LanguageModel

NGRAM = "ngram"
HEADS = "heads"
_MOST_TOKENS = 64


@dataclass(frozen=True)
class Speculation:
    """Settings of speculative decoding: cheap draft tokens that the model verifies in one step.

    Attributes:
        draft: Source of the draft tokens: ``"ngram"`` for prompt lookup; ``"heads"`` for the MTP
            head in the checkpoint itself; the folder or hub name of an EAGLE-3 head; or a smaller
            model with the same tokenizer, as a path for ``load`` or as the result of ``load``. No
            other request should run in a draft model.
        tokens: Most draft tokens per sequence and step.
        cache_tokens: Capacity of the cache of a draft model or head; None for full contexts of all
            sequences, at most 32768 tokens. Ignored for a draft model that is loaded already.
        adaptive: Whether drafting pauses while drafting loses time.
    Raises: ConfigError: ``tokens`` is not an integer from 1 to 64, or ``draft`` has another type.
    """

    draft: str | Path | LanguageModel = NGRAM
    tokens: int = 4
    cache_tokens: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        count = self.tokens
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_TOKENS:
            raise ConfigError(
                f"tokens of Speculation is {count!r}, must be an integer from 1 to {_MOST_TOKENS}"
            )
        if not (isinstance(self.draft, str | Path) or hasattr(self.draft, "engine")):
            raise ConfigError(
                f"draft of Speculation is {self.draft!r}, must be 'ngram', 'heads', a path or a "
                "LanguageModel"
            )

    @classmethod
    def of(cls, value: str | Path | Speculation) -> Speculation:
        """Convert the argument ``speculation`` of ``load`` to settings.

        Raises: ConfigError: the argument has another type.
        """
        if isinstance(value, Speculation):
            return value
        if not isinstance(value, str | Path):
            raise ConfigError(
                f"speculation is of the type {type(value).__name__}. Try: 'ngram', 'heads', the "
                "path of a draft model, or Speculation(...)"
            )
        return cls(value)
