"""The model that verifies guesses, as what guesses for it has to know it before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interposer import CheckpointFile
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._plan import Plan
from interposer_models._tokenizer import TextTokenizer

if TYPE_CHECKING:
    from interposer_models._language_model import LanguageModel

_CACHE_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class Target:
    """The model that verifies guesses, whose weights need not be there yet.

    Attributes:
        checkpoint: with its weights.
        load: loads another model for the same device, with ``cache_tokens``.
    """

    planned: Plan
    checkpoint: Checkpoint | CheckpointFile
    tokenizer: TextTokenizer
    load: Callable[..., LanguageModel]
    max_sequences: int
    max_step_tokens: int

    @property
    def default_tokens(self) -> int:
        """The tokens that the cache of what guesses holds where nobody says it."""
        context: int = self.planned.model.config.max_position_embeddings
        return min(self.max_sequences * context, _CACHE_TOKENS)
