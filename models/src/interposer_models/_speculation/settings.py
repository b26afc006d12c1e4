"""The settings of speculative decoding, and the parts that they stand for."""

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
    """The choice of what guesses the next tokens, of which the model verifies several in a step.

    Attributes:
        draft: ``"ngram"``, which looks up what followed the newest tokens before; ``"heads"``, by
            which the checkpoint itself predicts further tokens; the folder or name of a head of
            EAGLE-3; or a smaller model with the same tokenizer: what ``load`` takes, or what it
            returned. Its cache is for guesses then, and no other request should run in it.
        tokens: that are guessed for a sequence at most.
        cache_tokens: that the cache of a draft model holds that is loaded here; None takes what
            full contexts of all sequences need, and 32768 at most.
        adaptive: guesses pause while they cost more time than they save.
    Raises: ConfigError: ``tokens`` is no integer from 1 to 64, or ``draft`` is something else.
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
    def of(cls, given: str | Path | Speculation) -> Speculation:
        """Return the settings that ``load`` was given.

        Raises: ConfigError: they are of another type.
        """
        if isinstance(given, Speculation):
            return given
        if not isinstance(given, str | Path):
            raise ConfigError(
                f"speculation is of the type {type(given).__name__}. Try: 'ngram', 'heads', the "
                "path of a draft model, or Speculation(...)"
            )
        return cls(given)
