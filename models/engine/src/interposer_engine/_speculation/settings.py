"""Settings of speculative decoding, and checks of the draft model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer import CheckpointFile
from interposer.errors import ConfigError
from interposer_engine._checkpoint.files import Checkpoint, HubModel
from interposer_engine._encoder_inputs import has_encoder_inputs
from interposer_engine._plan import Plan
from interposer_engine._tokenizer import TextTokenizer

if TYPE_CHECKING:
    from interposer_engine._language_model import LanguageModel


NGRAM = "ngram"
HEADS = "heads"
_MOST_TOKENS = 64


@dataclass(frozen=True)
class Speculation:
    """Settings of speculative decoding: cheap draft tokens, verified by the model in one step.

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
        """Convert the argument ``speculation`` of ``load`` to ``Speculation`` settings.

        Raises: ConfigError: the argument has another type, or is a text that names no draft model.
        """
        if isinstance(value, Speculation):
            return value
        if not isinstance(value, str | Path):
            raise ConfigError(
                f"speculation is of the type {type(value).__name__}. Try: 'ngram', 'heads', the "
                "path of a draft model, or Speculation(...)"
            )
        is_path = isinstance(value, Path) or Path(value).exists() or HubModel.named(value)
        if not (is_path or value in (NGRAM, HEADS)):
            raise ConfigError(
                f"speculation is {value!r}, must be 'ngram', 'heads', or the folder or name of a "
                f"draft model, and there is no folder {value!r}"
            )
        return cls(value)


_CACHE_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class Target:
    """The target model, which verifies draft tokens; its weights need not be loaded yet.

    Attributes:
        planned: The planned model.
        checkpoint: The checkpoint of the weights.
        tokenizer: The tokenizer.
        load: Loads another model for the same device, with ``cache_tokens``.
        max_sequences: Most running sequences.
        max_step_tokens: Most tokens of a step.
    """

    planned: Plan
    checkpoint: Checkpoint | CheckpointFile
    tokenizer: TextTokenizer
    load: Callable[..., LanguageModel]
    max_sequences: int
    max_step_tokens: int

    @property
    def default_tokens(self) -> int:
        """Default number of tokens in the KV cache of a draft model or head."""
        context: int = self.planned.model.config.max_position_embeddings
        return min(self.max_sequences * context, _CACHE_TOKENS)


def check_sources(path: Path, model: Any) -> None:
    """Raise ConfigError if the model at ``path`` has an encoder, which draft models cannot use."""
    if has_encoder_inputs(model):
        raise ConfigError(
            f"{path} has an encoder, and draft models cannot read an encoder input. "
            "Try: speculation='ngram', which looks up the decoder's own tokens"
        )


def check_vocabulary(
    path: Path, vocab_size: int, tokenizer: TextTokenizer, draft: LanguageModel
) -> None:
    """Raise ConfigError if the draft model's vocabulary differs from that of the target model."""
    vocabulary, draft_vocabulary = tokenizer.vocabulary, draft.tokenizer.vocabulary
    # Without a tokenizer, only the vocabulary sizes can be compared.
    if vocabulary and draft_vocabulary:
        differing = vocabulary.items() ^ draft_vocabulary.items()
        is_same, difference = not differing, f"{len({text for text, _ in differing})} tokens differ"
    else:
        size = draft.engine.model.config.vocab_size
        is_same, difference = size == vocab_size, f"{size} and {vocab_size} tokens"
    if not is_same:
        raise ConfigError(
            f"The draft model {draft.path} has another vocabulary than {path}: {difference}. "
            "Try: a draft of the same family, or speculation='ngram'"
        )
