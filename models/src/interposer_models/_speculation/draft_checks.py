"""The judgement of draft models, which have to be of the tokens of their target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer.errors import ConfigError
from interposer_models._engine.sources import reads_sources

if TYPE_CHECKING:
    from interposer_models._language_model import LanguageModel
    from interposer_models._tokenizer import TextTokenizer


def check_sources(path: Path, model: Any) -> None:
    """Raise ConfigError for a model with an encoder, as target or as draft."""
    if reads_sources(model):
        raise ConfigError(
            f"{path} has an encoder, and a draft model is given no source to read. "
            "Try: speculation='ngram', which looks up the decoder's own tokens"
        )


def check_vocabulary(
    path: Path, vocab_size: int, tokenizer: TextTokenizer, draft: LanguageModel
) -> None:
    """Raise ConfigError where the draft has other tokens than the model at ``path``."""
    own, other = tokenizer.vocabulary, draft.tokenizer.vocabulary
    if own and other:
        differing = own.items() ^ other.items()
        same, told = not differing, f"{len({text for text, _ in differing})} tokens differ"
    else:
        size = draft.engine.model.config.vocab_size
        same, told = size == vocab_size, f"{size} and {vocab_size} tokens"
    if not same:
        raise ConfigError(
            f"The draft model {draft.path} has another vocabulary than {path}: {told}. "
            "Try: a draft of the same family, or speculation='ngram'"
        )
