"""Layout of a model's KV cache: groups of attention layers, page pools, and sizes in bytes.

``PagedModel`` is the interface of a model with such a cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from interposer import AttentionBackend
from interposer_engine._encoder_inputs import sees_source
from interposer_engine._encoder_pages import EncoderPagePool
from interposer_engine._pages import CacheContents, PagePool, window_pages
from interposer_engine._prefix_pool import PrefixPool, check_shared_prefixes
from interposer_ops.devices.host_memory import cache_memory
from interposer_ops.layers.states import StateLayout


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Attention layers with equal windows, which share one page pool.

    Attributes:
        seen_tokens: Window: the number of tokens that a token attends to, including the token; None
            for full attention.
        num_layers: Number of layers in the group.
        page_bytes: Size of one page over all layers of the group.
        most_pages: Upper bound on the pages that all running sequences hold; None if the bound
            depends on sequence lengths.
        is_source: Whether the layers attend to the encoder input instead of the sequence.
    """

    seen_tokens: int | None
    num_layers: int
    page_bytes: int
    most_pages: int | None
    is_source: bool = False

    @property
    def num_zero_pages(self) -> int:
        """Number of zero-filled pages, which replace freed pages in page tables."""
        return 0 if self.seen_tokens is None else 1

    def num_pages(self, num_token_pages: int) -> int:
        """Return this group's page count if full attention has ``num_token_pages`` pages."""
        return num_token_pages if self.most_pages is None else min(num_token_pages, self.most_pages)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The groups of a model's attention layers, the widest attention window first.

    Attributes:
        groups: The groups of layers.
        page_size: Tokens per page.
        spare_pages: Additional pages in each pool that no sequence gets, for the padding of graphs.
    """

    groups: Sequence[CacheGroup]
    page_size: int
    spare_pages: int = 0

    @classmethod
    def of(
        cls,
        backends: Iterable[AttentionBackend],
        page_size: int,
        max_sequences: int,
        max_step_tokens: int,
        spare_pages: int = 0,
    ) -> CacheShape:
        """Group the backends' layers by attention window; without layers, return one empty group.

        A sequence holds the pages of one window and of the tokens that a step adds. So all
        sequences together never need more than ``most_pages`` of a group with a window.
        """
        page_bytes_by_kind: dict[tuple[int | None, bool], list[int]] = {}
        for backend in backends:
            kind = backend.seen_tokens, sees_source(backend.spec)
            page_bytes_by_kind.setdefault(kind, []).append(backend.kv_layout().page_bytes())
        groups = []
        for window, is_source in sorted(page_bytes_by_kind or {(None, False): []}, key=_order):
            most_pages = None
            if window is not None:
                # One page more than the window touches, because new tokens may start a page.
                pages_per_sequence = window_pages(window, page_size) + 1
                most_pages = max_sequences * pages_per_sequence + max_step_tokens // page_size
            layer_bytes = page_bytes_by_kind.get((window, is_source), [])
            groups.append(
                CacheGroup(window, len(layer_bytes), sum(layer_bytes), most_pages, is_source)
            )
        return cls(groups, page_size, spare_pages)

    def pool_index(self, backend: AttentionBackend) -> int:
        """Return the position of a backend's page pool in ``by_pool``."""
        kind = backend.seen_tokens, sees_source(backend.spec)
        return [(group.seen_tokens, group.is_source) for group in self.by_pool].index(kind)

    @property
    def by_pool(self) -> list[CacheGroup]:
        """The groups in the order of the page pools: the encoder-input group is last."""
        return sorted(self.groups, key=lambda group: group.is_source)

    def num_bytes(self, num_token_pages: int) -> int:
        """Return the size in bytes of a KV cache of ``num_token_pages`` pages."""
        return self._fixed_bytes + sum(
            group.num_pages(num_token_pages) * group.page_bytes for group in self.groups
        )

    def pages_within(self, capacity_bytes: int) -> int | None:
        """Return the number of token pages that fit into ``capacity_bytes``; None if unlimited.

        The size as a function of the page count is piecewise linear and concave: a group with a
        window stops growing at ``most_pages``. So the result is the maximum over the linear pieces.
        """
        free_bytes = capacity_bytes - self._fixed_bytes
        growing_page_bytes = sum(group.page_bytes for group in self.groups)
        num_pages = free_bytes // growing_page_bytes if growing_page_bytes else None
        # The group with the smallest window stops growing first.
        for group in reversed(self.groups):
            if num_pages is None or group.most_pages is None:
                break
            free_bytes -= group.most_pages * group.page_bytes
            growing_page_bytes -= group.page_bytes
            if growing_page_bytes:
                num_pages = max(num_pages, free_bytes // growing_page_bytes)
            elif free_bytes >= 0:
                num_pages = None
        return num_pages

    def parts(self, num_token_pages: int) -> str:
        """Describe the tokens and layers of each layer group; "" if all have full attention."""
        if all(group.seen_tokens is None and not group.is_source for group in self.groups):
            return ""
        parts = []
        for group in self.groups:
            tokens = group.num_pages(num_token_pages) * self.page_size
            layers = "layer" if group.num_layers == 1 else "layers"
            if group.is_source:
                kind = f"cross-attention {layers}"
            elif group.seen_tokens is None:
                kind = f"full-attention {layers}"
            else:
                kind = f"{layers} with a window of {group.seen_tokens}"
            parts.append(f"{tokens} in {group.num_layers} {kind}")
        return ", ".join(parts)

    @property
    def _fixed_bytes(self) -> int:
        return sum((self.spare_pages + g.num_zero_pages) * g.page_bytes for g in self.groups)


def _order(kind: tuple[int | None, bool]) -> tuple[float, bool]:
    """Return a sort key that orders layer groups by window, the widest first."""
    return -(kind[0] or float("inf")), kind[1]


class Sizes(Protocol):
    """The model sizes against which requests are checked."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Context length in tokens."""
        ...


class PagedLayer(Protocol):
    """One attention layer with its paged backend."""

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend of the layer; layers with equal specs share one backend."""
        ...


class PagedModel(Protocol):
    """Interface of a decoder that keeps all state in paged KV caches and recurrent states.

    A model with recurrent layers has the attribute ``state_layers``, as a ``CausalModel``. A model
    that attends to an encoder input also implements ``EncoderModel``.
    """

    @property
    def config(self) -> Sizes:
        """The sizes of the model."""
        ...

    @property
    def attention_layers(self) -> Sequence[PagedLayer]:
        """The attention layers in order; the i-th cache belongs to the i-th layer."""
        ...

    def reserve_positions(self, count: int, device: str) -> None:
        """Prepare for at least ``count`` positions, without moving memory that is large enough."""
        ...

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the tokens at ``rows``, or of all tokens; see ``CausalLM``."""
        ...


class Caches:
    """Page pools, KV caches and recurrent states of one model.

    Attributes:
        backends: Attention backend of each attention layer, in order.
        pool_indices: Index of the page pool of each backend.
        pools: Page pools of the decoder's tokens, the pool of the widest window first.
        encoder_pool: Page pool of the encoder inputs, which counts as the pool after ``pools``;
            None without an encoder.
        is_prefix_lm: Whether prompt tokens attend in both directions in some layer.
        takes_mutual_runs: Whether tokens of an encoded run can attend in both directions.
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
        """Create the page pools without allocating memory.

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
        self.is_prefix_lm = is_prefix_lm(model)
        self.takes_mutual_runs = any(backend.spec.prefix_lm for backend in self.backends)
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
        self.encoder_pool: EncoderPagePool | None = None
        if shape.by_pool[-1].is_source:
            self.encoder_pool = EncoderPagePool(pools.pop().num_pages, page_size)
        self.pools = pools

    def spare_pages(self, count: int) -> list[range]:
        """Return, for each pool, the numbers of ``count`` pages that no sequence ever gets."""
        return [range(first, first + count) for first in self._first_spare_pages]

    def allocate(self, device: str, num_spare: int) -> list[Any]:
        """Allocate the cache of each attention layer, then the states of each recurrent layer.

        Args:
            num_spare: Number of spare pages in each pool.
        """
        # A backend allocates all of its layers at once, because one page may hold all of them.
        caches_by_backend = {
            backend: iter(self._allocate_layers(backend, count, device, num_spare))
            for backend, count in Counter(self.backends).items()
        }
        caches: list[Any] = [next(caches_by_backend[backend]) for backend in self.backends]
        return [*caches, *self.allocate_states(self._num_slots, device)]

    def allocate_states(self, num_rows: int, device: str) -> list[tuple[torch.Tensor, ...]]:
        """Allocate ``num_rows`` rows of state for each recurrent layer."""
        return [state.allocate(num_rows, device, cache_memory) for state in self.states]

    def contents(self, caches: list[Any]) -> CacheContents:
        """Wrap the result of ``allocate``, to copy single pages and state rows."""
        pools: list[list[tuple[torch.Tensor, int]]] = [[] for _ in self.pools]
        count = len(self.backends)
        for backend, cache in zip(self.backends, caches[:count], strict=True):
            pools[self.pool_indices[backend]].append((cache, backend.kv_layout().page_axis))
        return CacheContents(pools, caches[count:])

    def _allocate_layers(
        self, backend: AttentionBackend, num_layers: int, device: str, num_spare: int
    ) -> list[torch.Tensor]:
        """Allocate the caches of one backend's layers, and zero pages that padding rows read."""
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


def is_prefix_lm(model: PagedModel) -> bool:
    """Return whether the tokens of a prompt attend in both directions in some layer.

    In a model whose encoded runs do, other tokens of a prompt attend causally.
    """
    return not getattr(model.config, "runs_attend_both_ways", False) and any(
        layer.backend.spec.prefix_lm for layer in model.attention_layers
    )


def slots_for(max_sequences: int) -> int:
    """Return the number of state slots: one per running sequence, and one for ``Engine.logits``."""
    return max_sequences + 1
