"""Paged attention of the compiled library, over pages that store keys in tiles.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch

from interposer import (
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from interposer.tooling import UINT4
from interposer_cpu import native
from interposer_cpu._kernels.paged import NativePagedBackend
from interposer_ops.attention import paged_attention
from interposer_ops.caches import GROUP_SIZE, grouped_bytes

_LANES = 16
_MOST_HEAD_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one step: its blocks of queries and of keys.

    Attributes:
        blocks: int64, the library's plan; it contains addresses of tensors of ``batch``.
        address: address of ``blocks``.
        batch: kept alive for ``blocks``.
    """

    blocks: torch.Tensor
    address: int
    batch: AttentionBatch


class PrefixPlan(Plan):
    """Plan of a step in which the tokens of prefixes attend to each other in both directions.

    Fused calls of blocks take a ``Plan`` only, so that these steps call ``forward``.
    """

    __slots__ = ()


@final
class NativeBackend(NativePagedBackend):
    """Native paged attention: blocks of queries over tiles of 16 keys.

    Long contexts are split into parts of 512 keys. For the layout of tiles in a page, see
    native/attention/cache.h. Steps with prefixes compute the sequences that have one again, by the
    op ``paged_attention`` over rows copied from the tiles.
    """

    rounded_dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        *NativePagedBackend.rounded_dtypes,
        UINT4,
    )

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        library = native.library()
        self._attend, self._plan = library.attention, library.plan_attention
        self._cache_size = self.kv_layout().dtype.itemsize
        if spec.prefix_lm:
            dims = {**spec.dims(), "scaled": False, "per_head": False}
            self._attend_prefix = site.bind(paged_attention, **dims, causal=True)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept the specs of ``NativePagedBackend``, and prefixes cached in the model's dtype."""
        if spec.cache_dtype == spec.dtype:
            spec = replace(spec, prefix_lm=False)
        return super().accepts(spec, capability)

    @classmethod
    def _judge_sizes(cls, spec: AttentionSpec) -> Verdict:
        """Accept head sizes and page sizes that are multiples of 16."""
        if spec.head_size % _LANES or spec.head_size > _MOST_HEAD_SIZE:
            return Verdict.refuse(
                f"takes head sizes of multiples of {_LANES} up to {_MOST_HEAD_SIZE}, "
                f"got {spec.head_size}"
            )
        if spec.page_size % _LANES:
            return Verdict.refuse(
                f"stores keys {_LANES} tokens at a time, the page size is {spec.page_size}"
            )
        if spec.cache_dtype == UINT4 and spec.head_size % GROUP_SIZE:
            return Verdict.refuse(
                f"stores groups of {GROUP_SIZE} numbers of 4 bits, the head size is "
                f"{spec.head_size}"
            )
        return Verdict.accept()

    def kv_layout(self) -> KVCacheLayout:
        """Define the layout ``[K, P, 2, S, D]``; for uint4, bytes ``[K, P, 2, S, 5 D / 8]``."""
        spec = self.spec
        if spec.cache_dtype != UINT4:
            return super().kv_layout()
        page_shape = (spec.num_kv_heads, 2, spec.page_size, grouped_bytes(spec.head_size))
        return KVCacheLayout(page_shape, 1, (0, 1, 2, 3, 4), torch.uint8)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Divide a step into blocks of queries and keys, once for all layers."""
        pages = batch.page_table
        if pages.stride(-1) != 1:
            pages = pages.contiguous()
            batch = replace(batch, page_table=pages)
        arguments = (
            *self._facts,
            batch.seq_lens.shape[0],
            batch.query_starts.data_ptr(),
            batch.seq_lens.data_ptr(),
            pages.data_ptr(),
            pages.stride(0),
            batch.slots.data_ptr(),
        )
        num_bytes = self._plan(*arguments, 0)  # with address 0, only the size is computed
        blocks = torch.empty(num_bytes // 8, dtype=torch.int64)
        address = blocks.data_ptr()
        self._plan(*arguments, address)
        has_prefixes = self.spec.prefix_lm and batch.prefix_lens is not None
        return (PrefixPlan if has_prefixes else Plan)(blocks, address, batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Plan,
        *,
        scales: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values, then compute attention ``[T, N, D]``."""
        query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        dense_strides = self._head_strides
        # Query, key and value are usually views of one projection: only gaps inside a token copy.
        if query_strides[1:] != dense_strides:
            query, query_strides = _contiguous(query)
        if key_strides[1:] != dense_strides:
            key, key_strides = _contiguous(key)
        if value_strides[1:] != dense_strides:
            value, value_strides = _contiguous(value)
        head_stride, page_stride, *_ = cache.stride()
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if torch.compiler.is_compiling():
            # The op's schema has no optional tensors: an empty one stands for None.
            absent = query.new_empty(0, dtype=torch.float32)
            key_scale, value_scale = (absent, absent) if scales is None else scales.unbind(0)
            sink = absent if sinks is None else sinks
            torch.ops.interposer_cpu.attention_out(
                out, cache, query, key, value, plan.blocks, sink, key_scale, value_scale
            )
            return out
        # Float32 rows of [2, 1] or [2, K]: keys, then values. Stride 0 repeats one scale for all
        # heads.
        key_scales = value_scales = scale_stride = 0
        if scales is not None:
            key_scales = scales.data_ptr()
            value_scales = key_scales + 4 * scales.shape[1]
            scale_stride = 1 if scales.shape[1] > 1 else 0
        self._attend(
            plan.address,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            query_strides[0],
            key_strides[0],
            value_strides[0],
            cache.data_ptr(),
            head_stride * self._cache_size,
            page_stride * self._cache_size,
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            key_scales,
            value_scales,
            scale_stride,
        )
        if type(plan) is PrefixPlan:
            self._compute_prefixes(out, query, cache, plan.batch, sinks)
        return out

    def _compute_prefixes(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> None:
        """Write attention in both directions to the rows of ``out`` that belong to prefixes.

        One sequence at a time, so that the result does not depend on the other sequences.
        """
        spec = self.spec
        assert batch.prefix_lens is not None  # of a PrefixPlan
        starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
        for b, prefix in enumerate(batch.prefix_lens.tolist()):
            start, stop = starts[b], starts[b + 1]
            # Later tokens are causal.
            if prefix <= lengths[b] - (stop - start):
                continue
            pages = batch.page_table[b, : -(-lengths[b] // spec.page_size)]
            keys, values = self._rows(cache[:, pages])
            out[start:stop] = self._attend_prefix(
                query[start:stop],
                keys,
                values,
                torch.arange(len(pages))[None],
                torch.tensor([0, stop - start]),
                batch.seq_lens[b : b + 1],
                stop - start,
                spec.scale,
                True,
                spec.window_tokens,
                spec.softcap,
                sinks,
                None,
                batch.prefix_lens[b : b + 1],
                None,
                None,
            )

    @staticmethod
    def _rows(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values ``[P, S, K, D]`` out of the tiles of pages ``[K, P, 2, S, D]``."""
        num_kv_heads, num_pages, _, page_size, head_size = pages.shape
        count = 4 // pages.element_size()  # elements of a word
        tiles = num_kv_heads, num_pages, page_size // _LANES
        shape = num_pages, page_size, num_kv_heads, head_size
        keys = pages[:, :, 0].reshape(*tiles, head_size // count, _LANES, count)
        values = pages[:, :, 1].reshape(*tiles, _LANES // count, head_size, count)
        return (
            keys.permute(1, 2, 4, 0, 3, 5).reshape(shape),
            values.permute(1, 2, 3, 5, 0, 4).reshape(shape),
        )


def _contiguous(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    x = x.contiguous()
    return x, x.stride()
