"""Decoder attention over a 4-bit cache, from standard ops.

A step first dequantizes the pages that it reads to the model's dtype.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages of the longest
sequence, P pages, S page size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from interposer.tooling import UINT4
from interposer_ops.attention._alibi import alibi_slopes
from interposer_ops.attention._paged_attention import paged_attention
from interposer_ops.caches._grouped_cache import (
    GROUP_SIZE,
    grouped_bytes,
    read_groups,
    round_groups,
)


class GroupedPlan(NamedTuple):
    """Plan of a step: the pages to read, and the batch over dequantized copies of the pages.

    Attributes:
        pages: ``[B M]`` int64.
        batch: the batch, with a page table that points to the copies.
    """

    pages: Tensor
    batch: AttentionBatch


class GroupedBackend(AttentionBackend):
    """Attention backend that stores keys and values in 4 bits and attends to the stored values.

    Windows, softcap, sinks, ALiBi, prefixes and shared caches work as in ``paged_attention``.
    """

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        dequantized = replace(spec, cache_dtype=spec.dtype)
        dims = {**dequantized.dims(), "scaled": False, "per_head": False, "causal": True}
        self._attend: Any = site.bind(paged_attention, **dims)
        self._slopes: Tensor | None = None
        if spec.alibi:
            device = site.resolver.device.torch_device
            self._slopes = alibi_slopes(spec.num_heads, device, spec.alibi_bias_max)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders with a uint4 cache, if the group size divides the head size."""
        if spec.cache_dtype != UINT4:
            return Verdict.refuse(f"stores 4 bits, requested {spec.cache_dtype}")
        if spec.head_size % GROUP_SIZE:
            return Verdict.refuse(
                f"stores groups of {GROUP_SIZE} numbers, the head size is {spec.head_size}"
            )
        return replace(
            spec, cache_dtype=spec.dtype, sinks=False, alibi=False, prefix_lm=False, shared=False
        ).judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Describe the cache of one layer, ``[2, P, S, K, 5 D / 8]`` uint8, keys first."""
        spec = self.spec
        page_shape = (2, spec.page_size, spec.num_kv_heads, grouped_bytes(spec.head_size))
        return KVCacheLayout(page_shape, 1, (0, 1, 2, 3, 4), torch.uint8)

    def plan(self, batch: AttentionBatch) -> GroupedPlan:
        """Plan a step: the pages to dequantize, and a page table of the dequantized copies."""
        # Copies are made in the order of the page table, so the copies' table simply counts up.
        table = batch.page_table
        copies = torch.arange(table.numel(), device=table.device).view(table.shape)
        return GroupedPlan(table.flatten(), replace(batch, page_table=copies))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        plan: GroupedPlan,
        *,
        sinks: Tensor | None = None,
        stored: bool = False,
    ) -> Tensor:
        """Store the step's keys and values in 4 bits, then compute attention ``[T, N, D]``."""
        if not stored:
            self._write(key, value, cache, plan.batch.slots)
        # This step's tokens are read back from the cache, rounded as later steps will see them.
        keys, values = (read_groups(part[plan.pages], query.dtype) for part in cache.unbind(0))
        spec, batch = self.spec, plan.batch
        prefixes = batch.prefix_lens if spec.prefix_lm else None
        out: Tensor = self._attend(
            query,
            keys,
            values,
            batch.page_table,
            batch.query_starts,
            batch.seq_lens,
            batch.max_query_tokens,
            spec.scale,
            True,
            spec.window_tokens,
            spec.softcap,
            sinks,
            self._slopes,
            prefixes,
            None,
            None,
        )
        return out

    def _write(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        size = self.spec.page_size
        for x, stored in zip((key, value), cache.unbind(0), strict=True):
            stored[slots // size, slots % size] = round_groups(x)
