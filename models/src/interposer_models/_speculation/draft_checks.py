"""Checks that a draft model fits the target model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer.errors import ConfigError
from interposer_models._engine.sources import reads_sources

if TYPE_CHECKING:
    from interposer_models._language_model import LanguageModel
    from interposer_models._tokenizer import TextTokenizer


def check_sources(path: Path, model: Any) -> None:
    """Raise ConfigError if the model at ``path`` has an encoder."""
    if reads_sources(model):
        raise ConfigError(
            f"{path} has an encoder, and draft models cannot read an encoder input. "
            "Try: speculation='ngram', which looks up the decoder's own tokens"
        )


def check_vocabulary(
    path: Path, vocab_size: int, tokenizer: TextTokenizer, draft: LanguageModel
) -> None:
    """Raise ConfigError if the draft model has another vocabulary than the model at ``path``."""
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
