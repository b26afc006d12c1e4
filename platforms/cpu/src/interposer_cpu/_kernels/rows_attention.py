"""Paged attention of the compiled library, for any page size and head size.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from interposer import AttentionBatch, AttentionSpec, Site, Verdict
from interposer_cpu import native
from interposer_cpu._kernels.interface import CACHE_TYPES
from interposer_cpu._kernels.paged import NativePagedBackend
from interposer_ops.attention import lone_queries


class NativeRowsBackend(NativePagedBackend):
    """Native paged attention over keys stored as rows, which every call transposes."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._attend = native.library().page_attention

    @classmethod
    def _judge_sizes(cls, spec: AttentionSpec) -> Verdict:
        """Accept all head sizes and page sizes, if the kv heads divide the heads."""
        if spec.num_heads % spec.num_kv_heads:
            heads = f"{spec.num_heads} heads, {spec.num_kv_heads} kv heads"
            return Verdict.refuse(f"needs heads in groups of one size, got {heads}")
        return Verdict.accept()

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Plan a step: contiguous page table; for encoder inputs, one query per sequence."""
        if self.spec.type == "encoder_decoder":
            batch = lone_queries(batch)
        pages = batch.page_table
        return batch if pages.stride(-1) == 1 else replace(batch, page_table=pages.contiguous())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
        *,
        scales: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        stored: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values, then compute attention ``[T, N, D]``."""
        if stored:
            plan = replace(plan, slots=plan.slots[:0])  # nothing is written
        query, key, value = (
            x if x.stride()[1:] == self._head_strides else x.contiguous()
            for x in (query, key, value)
        )
        sinks = None if sinks is None else sinks.float()
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if torch.compiler.is_compiling():
            # Ops of compiled graphs take an empty tensor for None; direct calls take the address 0.
            absent = query.new_empty(0, dtype=torch.float32)
            torch.ops.interposer_cpu.page_attention_out(
                out,
                cache,
                query,
                key,
                value,
                plan.page_table,
                plan.query_starts,
                plan.seq_lens,
                plan.slots,
                absent if sinks is None else sinks,
                absent if scales is None else scales,
                CACHE_TYPES[self.spec.cache_dtype],
                self.spec.scale,
                self.spec.softcap or 0.0,
                self.spec.window_tokens or 0,
            )
            return out
        size = cache.element_size()
        head_stride, page_stride, half_stride, token_stride, _ = cache.stride()
        address, pages = cache.data_ptr(), plan.page_table
        self._attend(
            *self._facts,
            plan.seq_lens.shape[0],
            plan.query_starts.data_ptr(),
            plan.seq_lens.data_ptr(),
            pages.data_ptr(),
            pages.stride(0),
            plan.slots.shape[0],
            plan.slots.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            address,
            address + half_stride * size,
            head_stride * size,
            page_stride * size,
            token_stride * size,
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            0 if scales is None or scales.shape[1] == 1 else 1,
        )
        return out
