"""Decoder attention through FlashInfer, if the package is installed.

FlashInfer's ``plan`` (once per step) and ``run`` (once per layer) match ``AttentionBackend``.
FlashInfer plans on the host, using the batch's host copy of the lengths. The first plan compiles
kernels, which needs nvcc or the package flashinfer-jit-cache.

Call arguments are tested on the CPU against stand-in classes; no GPU has run this module.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
Source: ``BatchDecodeWithPagedKVCacheWrapper`` and ``BatchPrefillWithPagedKVCacheWrapper`` in
flashinfer/decode.py and prefill.py of flashinfer-ai/flashinfer: starts, pages and lengths in int32,
a causal mask that is aligned to the last query and key, a window of tokens to the left of the
query's own, scales of a cache of 8 bits as numbers.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from interposer_cuda._flashinfer.wrappers import (
    FlashInferPlan,
    FlashInferWrappers,
    graph_buffers,
    pages_of,
)
from interposer_cuda._providers import FLASHINFER
from interposer_ops.attention import window_ends
from interposer_ops.caches import CacheWriter

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_SIZES = (64, 128, 256)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_DECODE, _PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"


class FlashInferBackend(AttentionBackend):
    """Writes the cache with interposer's kernel, then attends with FlashInfer's wrappers."""

    plans_on_host = True

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._writer = CacheWriter(spec, site)
        self._wrappers = FlashInferWrappers(site)
        self._sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.page_size)
        self._plan_arguments = {
            "sm_scale": spec.scale,
            "window_left": window_ends(spec)[0],
            "logits_soft_cap": spec.softcap,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.cache_dtype,
        }
        if not site.resolver.described:
            self._package: Any = import_module("flashinfer")

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept 16-bit decoders with a cache of the same dtype or of 8-bit floats."""
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 16 bit floats, got {spec.dtype}")
        if str(spec.dtype).removeprefix("torch.") not in capability.formats:
            return Verdict.refuse(
                f"{capability.architecture} has no matrix instructions for {spec.dtype}"
            )
        if spec.head_size not in _HEAD_SIZES:
            return Verdict.refuse(
                f"takes heads of {', '.join(map(str, _HEAD_SIZES))}, got {spec.head_size}"
            )
        # judge_plain_decoder() refuses a quantized cache, so hide the 8-bit dtype from it.
        if spec.cache_dtype in _FP8_DTYPES:
            if spec.head_scales:
                return Verdict.refuse("takes one scale for all heads of a cache, got one per head")
            spec = replace(spec, cache_dtype=spec.dtype)
        # Limits of the package come first: installing the package would not lift the limits.
        return spec.judge_plain_decoder() and FLASHINFER.judge()

    def kv_layout(self) -> KVCacheLayout:
        """Return the cache layout ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> FlashInferPlan:
        """Plan the step with FlashInfer, using the batch's host copy of the lengths."""
        if not len(batch.slots):
            return self._wrappers.new_plan(batch.slots, None)
        pages = pages_of(batch, self.spec.page_size)
        # With one query per sequence, the decode kernels split long caches over multiprocessors.
        if batch.max_query_tokens == 1 and len(batch.slots) == len(batch.seq_lens):
            wrapper = self._wrapper(_DECODE, batch)
            wrapper.plan(*pages, *self._sizes, **self._plan_arguments)
        else:
            wrapper = self._wrapper(_PREFILL, batch)
            starts = batch.on_host().query_starts.to(torch.int32)
            wrapper.plan(starts, *pages, *self._sizes, causal=True, **self._plan_arguments)
        return self._wrappers.new_plan(batch.slots, wrapper)

    def plan_fixed(self, batch: AttentionBatch) -> FlashInferPlan:
        """Plan a step with a new wrapper and buffers at fixed addresses, for a captured graph."""
        size, max_pages = batch.page_table.shape
        index_buffers = graph_buffers(
            batch,
            paged_kv_indptr_buffer=size + 1,
            paged_kv_indices_buffer=size * max_pages,
            paged_kv_last_page_len_buffer=size,
        )
        wrapper = self._new_wrapper(
            _DECODE, batch.slots.device, use_cuda_graph=True, **index_buffers
        )
        plan = FlashInferPlan(batch.slots, wrapper, None)
        self.update_plan(plan, batch)
        return plan

    def update_plan(self, plan: FlashInferPlan, batch: AttentionBatch) -> None:
        """Plan the next replay into the plan's own buffers, without synchronizing."""
        pages = pages_of(batch, self.spec.page_size)
        plan.wrapper.plan(*pages, *self._sizes, **self._plan_arguments)

    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        """Return the scale arguments of the cache writer, and the scales as Python floats."""
        numbers = {"k_scale": key_scale.item(), "v_scale": value_scale.item()}
        return self._writer.prepared(key_scale, value_scale), numbers

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlashInferPlan,
        *,
        scales: Any = None,
    ) -> torch.Tensor:
        """Write keys and values, then compute the attention; see ``AttentionBackend.forward``.

        Raises: RequestError: a newer plan has replaced ``plan``.
        """
        write_scales, read_scales = ((), {}) if scales is None else scales
        self._wrappers.check(plan)
        keys, values = cache.unbind(0)
        self._writer.store(key, value, keys, values, plan.slots, *write_scales)
        if plan.wrapper is None:
            return torch.empty_like(query)
        out: torch.Tensor = plan.wrapper.run(query.contiguous(), (keys, values), **read_scales)
        return out

    def _wrapper(self, name: str, batch: AttentionBatch) -> Any:
        """Return the wrapper ``name`` for steps outside a graph, created on first use."""
        return self._wrappers.cached(name, lambda: self._new_wrapper(name, batch.slots.device))

    def _new_wrapper(self, name: str, device: torch.device, **options: Any) -> Any:
        if self.spec.is_quantized:
            # The Hopper kernels (fa3) need 8-bit queries for an 8-bit cache.
            options["backend"] = "fa2"
        if name == _DECODE:
            # The kernels without tensor cores are compiled for a few GQA group sizes only.
            options["use_tensor_cores"] = self.spec.num_heads != self.spec.num_kv_heads
        workspace = self._wrappers.workspace(device)
        return getattr(self._package, name)(workspace, kv_layout="NHD", **options)
