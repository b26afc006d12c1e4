"""Page pools of a model's layers, and the cache memory of the pages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from interposer import AttentionBackend
from interposer_models._engine.cache_contents import CacheContents
from interposer_models._engine.cache_shape import CacheShape
from interposer_models._engine.paged_model import PagedModel
from interposer_models._engine.pages import PagePool
from interposer_models._engine.prefix_pages import PrefixPool, check_shared_prefixes
from interposer_ops.devices.host_memory import cache_memory
from interposer_ops.layers.states import StateLayout


class Caches:
    """Page pools, KV caches and recurrent states of one model.

    Attributes:
        backends: Attention backend of each attention layer, in order.
        pool_indices: Index of the page pool of each backend.
        pools: Page pools of the decoder's tokens, the pool of the widest window first.
        encoder_pool: Page pool of the encoder inputs, which counts as the pool after ``pools``;
            None without an encoder.
        is_prefix_lm: Whether prompt tokens attend in both directions in some layer.
        states: Layout of the state of each recurrent layer. The first pool hands out the state
            slots.
    """

    def __init__(
        self,
        model: PagedModel,
        page_size: int,
        num_pages: int,
        max_sequences: int,
        max_step_tokens: int,
        prefix_cache: bool = False,
    ) -> None:
        """Create the pools without allocating memory.

        Args:
            num_pages: Number of pages for the tokens of all sequences; pools of windows have fewer.
            prefix_cache: Whether sequences share the pages of equal prefixes; see ``PrefixPool``.
        Raises: ConfigError: ``prefix_cache`` for a model that cannot share prefixes.
        """
        self.max_sequences = max_sequences
        self.states: list[StateLayout] = [
            layer.state_layout() for layer in getattr(model, "state_layers", ())
        ]
        self._num_slots = slots_for(max_sequences) if self.states else 0
        self.backends = [layer.backend for layer in model.attention_layers]
        self.is_prefix_lm = any(backend.spec.prefix_lm for backend in self.backends)
        shape = CacheShape.of(self.backends, page_size, max_sequences, max_step_tokens)
        self.pool_indices = {backend: shape.pool_index(backend) for backend in self.backends}
        if prefix_cache:
            check_shared_prefixes(self.is_prefix_lm, shape.by_pool[-1].is_source)
        pool_class = PrefixPool if prefix_cache else PagePool
        pools = [
            pool_class(
                group.num_pages(num_pages),
                page_size,
                0 if index else self._num_slots,
                group.seen_tokens,
            )
            for index, group in enumerate(shape.by_pool)
        ]
        # Page numbers: first the pages of sequences, then the zero page, then the spare pages.
        self._first_spare_pages = [
            pool.num_pages + group.num_zero_pages
            for pool, group in zip(pools, shape.by_pool, strict=True)
        ]
        self.encoder_pool = pools.pop() if shape.by_pool[-1].is_source else None
        self.pools = pools

    def spare_pages(self, count: int) -> list[range]:
        """Return, for each pool, the numbers of ``count`` pages that no sequence gets."""
        return [range(first, first + count) for first in self._first_spare_pages]

    def allocate(self, device: str, num_spare: int) -> list[Any]:
        """Allocate the cache of each attention layer, then the states of each recurrent layer.

        Args:
            num_spare: Number of spare pages in each pool.
        """
        # A backend allocates all of its layers at once, because one page may hold all of them.
        caches_by_backend = {
            backend: iter(self._allocated(backend, count, device, num_spare))
            for backend, count in Counter(self.backends).items()
        }
        caches: list[Any] = [next(caches_by_backend[backend]) for backend in self.backends]
        return [*caches, *self.allocate_states(self._num_slots, device)]

    def allocate_states(self, num_rows: int, device: str) -> list[tuple[torch.Tensor, ...]]:
        """Allocate ``num_rows`` rows of each recurrent state."""
        return [state.allocate(num_rows, device, cache_memory) for state in self.states]

    def contents(self, caches: list[Any]) -> CacheContents:
        """Wrap the result of ``allocate`` for copies of single pages and state rows."""
        pools: list[list[tuple[torch.Tensor, int]]] = [[] for _ in self.pools]
        count = len(self.backends)
        for backend, cache in zip(self.backends, caches[:count], strict=True):
            pools[self.pool_indices[backend]].append((cache, backend.kv_layout().page_axis))
        return CacheContents(pools, caches[count:])

    def _allocated(
        self, backend: AttentionBackend, num_layers: int, device: str, num_spare: int
    ) -> list[torch.Tensor]:
        """Allocate the caches of one backend's layers, with zeroed pages where padding reads."""
        layout, pool_index = backend.kv_layout(), self.pool_indices[backend]
        first_spare = self._first_spare_pages[pool_index]
        caches = layout.allocate(num_layers, first_spare + num_spare, device, cache_memory)
        for cache in caches:
            if pool_index == len(self.pools):
                # No step writes the spare pages that padding reads as its encoder input.
                cache.narrow(layout.page_axis, first_spare, num_spare).zero_()
            elif (pool := self.pools[pool_index]).seen_tokens is not None:
                cache.select(layout.page_axis, pool.zero_page).zero_()
        return caches


def slots_for(max_sequences: int) -> int:
    """Return the number of state slots: one per running sequence, and one for ``Engine.logits``."""
    return max_sequences + 1
