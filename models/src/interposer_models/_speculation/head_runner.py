"""The steps of a prediction head over a paged cache of its own.

Dimensions: T tokens, B sequences, H hidden size of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager

from torch import Tensor

from interposer_models._decoder.prediction_head import PredictionHead
from interposer_models._engine.batch import StepBatch
from interposer_models._engine.caches import Caches
from interposer_models._engine.scheduler import Chunk, Scheduler


class HeadRunner:
    """Computes chunks of sequences, each with the states that its tokens follow.

    Attributes:
        scheduler: gives pages out.
    """

    def __init__(
        self,
        head: PredictionHead,
        device: str,
        *,
        page_size: int,
        num_pages: int,
        max_sequences: int,
        max_step_tokens: int,
        numerics: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Allocate the cache; see ``Runner``."""
        held = Caches(head, page_size, num_pages, max_sequences, max_step_tokens)
        self.head, self.device = head, device
        self.scheduler = Scheduler(held.pools, max_sequences, max_step_tokens)
        self._backends, self._places = held.backends, held.places
        self._numerics = numerics
        self._caches = held.allocate(device, 0)

    def compute(self, chunks: Items[Chunk], states: Tensor) -> Tensor:
        """Return the head's states ``[B, H]`` of the newest token of each chunk.

        Keys and values of all are in the cache then, though no token is counted as computed.

        Args:
            states: ``[T, H]``, of the tokens of all chunks.
        """
        page_size = self.scheduler.pools[0].page_size
        batch = StepBatch.build(chunks, page_size, self.device)
        self.head.reserve_positions(batch.attention.max_seq_tokens, self.device)
        with self._numerics():
            made = {each: each.plan(batch.by_pool[place]) for each, place in self._places.items()}
            plans = [made[backend] for backend in self._backends]
            rows = batch.attention.query_starts[1:] - 1
            steps = batch.token_ids, states, batch.positions
            return self.head(*steps, self._caches, plans, rows)  # type: ignore[no-any-return]

    def fused(self, states: Tensor) -> Tensor:
        """Return ``[T, H]`` of states of the model."""
        with self._numerics():
            return self.head.fused(states)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of the head's states."""
        with self._numerics():
            return self.head.logits(states)
