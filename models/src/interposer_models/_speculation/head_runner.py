"""Steps of an MTP head on a separate paged KV cache.

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
    """Computes chunks of sequences with the hidden states of the preceding tokens.

    Attributes:
        scheduler: Hands out the pages.
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
        """Allocate the KV cache; see ``Runner``."""
        caches = Caches(head, page_size, num_pages, max_sequences, max_step_tokens)
        self.head, self.device = head, device
        self.scheduler = Scheduler(caches.pools, max_sequences, max_step_tokens)
        self._backends, self._pool_indices = caches.backends, caches.pool_indices
        self._numerics = numerics
        self._caches = caches.allocate(device, 0)

    def compute(self, chunks: Items[Chunk], states: Tensor) -> Tensor:
        """Compute the head's states ``[B, H]`` of the newest token of each chunk.

        Writes the keys and values of all tokens to the cache, but does not advance the sequences.

        Args:
            states: ``[T, H]``, of the tokens of all chunks.
        """
        page_size = self.scheduler.pools[0].page_size
        batch = StepBatch.build(chunks, page_size, self.device)
        self.head.reserve_positions(batch.attention.max_seq_tokens, self.device)
        with self._numerics():
            plan_by_backend = {
                backend: backend.plan(batch.by_pool[pool_index])
                for backend, pool_index in self._pool_indices.items()
            }
            plans = [plan_by_backend[backend] for backend in self._backends]
            # The newest token of each chunk is its last row.
            rows = batch.attention.query_starts[1:] - 1
            steps = batch.token_ids, states, batch.positions
            return self.head(*steps, self._caches, plans, rows)  # type: ignore[no-any-return]

    def fused(self, states: Tensor) -> Tensor:
        """Project hidden states of the model to ``[T, H]``."""
        with self._numerics():
            return self.head.fused(states)

    def logits(self, states: Tensor) -> Tensor:
        """Compute the logits of the head's states."""
        with self._numerics():
            return self.head.logits(states)
