"""The target model of speculative decoding, reduced to the needs of draft sources."""

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
    """The model that verifies draft tokens; the weights need not be loaded yet.

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
        """Default capacity of a draft model's or head's cache, in tokens."""
        context: int = self.planned.model.config.max_position_embeddings
        return min(self.max_sequences * context, _CACHE_TOKENS)
