"""The pools of pages of a model's layers, and the memory that they number."""

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
    """The pages and states of the layers of a model.

    Attributes:
        backends: of the attention layers, in order.
        places: the number of each backend's pool.
        pools: of pages of tokens; that of the layers that see farthest is the first one.
        sources: the pool of what layers read of sources, numbered behind the others; None without.
        has_prefixes: in some layer the tokens of a prompt see each other in both directions.
        states: of the layers that keep one, for each of whose rows the first pool has a number.
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
        """Take no memory yet.

        Args:
            num_pages: that tokens of all sequences may take; layers with windows have fewer.
            prefix_cache: pages of equal beginnings are shared, see ``PrefixPool``.
        Raises: ConfigError: ``prefix_cache`` of a model whose prompts have no common beginnings.
        """
        self.max_sequences = max_sequences
        self.states: list[StateLayout] = [
            layer.state_layout() for layer in getattr(model, "state_layers", ())
        ]
        self._num_slots = slots_for(max_sequences) if self.states else 0
        self.backends = [layer.backend for layer in model.attention_layers]
        self.has_prefixes = any(backend.spec.prefix_lm for backend in self.backends)
        shape = CacheShape.of(self.backends, page_size, max_sequences, max_step_tokens)
        self.places = {backend: shape.place(backend) for backend in self.backends}
        if prefix_cache:
            check_shared_prefixes(self.has_prefixes, shape.by_pool[-1].is_source)
        kind = PrefixPool if prefix_cache else PagePool
        pools = [
            kind(
                group.num_pages(num_pages),
                page_size,
                0 if number else self._num_slots,
                group.seen_tokens,
            )
            for number, group in enumerate(shape.by_pool)
        ]
        self._firsts = [
            pool.num_pages + group.num_zero_pages
            for pool, group in zip(pools, shape.by_pool, strict=True)
        ]
        self.sources = pools.pop() if shape.by_pool[-1].is_source else None
        self.pools = pools

    def spare_pages(self, count: int) -> list[range]:
        """Return, for each pool, numbers of pages that no sequence is given."""
        return [range(first, first + count) for first in self._firsts]

    def allocate(self, device: str, num_spare: int) -> list[Any]:
        """Return the cache of each attention layer, then the states of the others.

        Args:
            num_spare: pages of each pool besides those that sequences are given.
        """
        shared = {
            backend: iter(self._allocated(backend, count, device, num_spare))
            for backend, count in Counter(self.backends).items()
        }
        caches: list[Any] = [next(shared[backend]) for backend in self.backends]
        return [*caches, *self.allocate_states(self._num_slots, device)]

    def allocate_states(self, num_rows: int, device: str) -> list[tuple[torch.Tensor, ...]]:
        """Return rows of the states of all layers that keep one."""
        return [state.allocate(num_rows, device, cache_memory) for state in self.states]

    def contents(self, caches: list[Any]) -> CacheContents:
        """Return what copies pages and rows of ``caches``, which ``allocate`` returned."""
        pools: list[list[tuple[torch.Tensor, int]]] = [[] for _ in self.pools]
        count = len(self.backends)
        for backend, cache in zip(self.backends, caches[:count], strict=True):
            pools[self.places[backend]].append((cache, backend.kv_layout().page_axis))
        return CacheContents(pools, caches[count:])

    def _allocated(
        self, backend: AttentionBackend, num_layers: int, device: str, num_spare: int
    ) -> list[torch.Tensor]:
        """Return the caches of the layers of a backend, with the page of zeros where it has one."""
        layout, place = backend.kv_layout(), self.places[backend]
        first = self._firsts[place]
        caches = layout.allocate(num_layers, first + num_spare, device, cache_memory)
        for cache in caches:
            if place == len(self.pools):
                # What padding sees of a source, no step writes.
                cache.narrow(layout.page_axis, first, num_spare).zero_()
            elif (pool := self.pools[place]).seen_tokens is not None:
                cache.select(layout.page_axis, pool.zero_page).zero_()
        return caches


def slots_for(max_sequences: int) -> int:
    """Return how many sequences have a state at most: those that run, and that of a call."""
    return max_sequences + 1
