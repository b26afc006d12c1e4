"""Decoder attention through FlashInfer, where it is installed.

Its two halves, ``plan`` once per step and ``run`` once per layer, are those of this contract. A
wrapper holds the plan that it made last, so that an older one is refused. It compiles its kernels
when it first plans, for which it needs nvcc, or the package flashinfer-jit-cache.

Arguments are tested on the processor against classes of the same meaning; on a GPU it was not run.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
Source: ``BatchDecodeWithPagedKVCacheWrapper`` and ``BatchPrefillWithPagedKVCacheWrapper`` in
flashinfer/decode.py and prefill.py of flashinfer-ai/flashinfer: starts, pages and lengths in int32,
a causal mask that is aligned to the last query and key, a window of tokens to the left of the
query's own, scales of a cache of 8 bits as numbers.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

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
from interposer.errors import RequestError
from interposer_cuda._flashinfer.pages import FlashInferPages
from interposer_cuda._providers import FLASHINFER
from interposer_ops.attention import window_ends
from interposer_ops.caches import CacheWriter

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_SIZES = (64, 128, 256)
_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
# What its documentation recommends for the partial results of split sequences.
_WORKSPACE_BYTES = 128 * 2**20


class FlashInferPlan(NamedTuple):
    """A step that a wrapper has planned.

    Attributes:
        slots: ``[T]`` int64.
        wrapper: None where there is nothing to attend to.
        number: of the plan among those of the backend.
    """

    slots: torch.Tensor
    wrapper: Any
    number: int


class FlashInferBackend(AttentionBackend):
    """Writes with the op's kernel, attends with the package's wrappers."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._writer = CacheWriter(spec, site)
        self._wrappers: dict[str, Any] = {}
        self._workspace: torch.Tensor | None = None
        self._number = 0
        if not site.resolver.described:
            self._package: Any = import_module("flashinfer")

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders in 16 bits, with a cache of the same dtype or of 8-bit floats."""
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 16 bit floats, got {spec.dtype}")
        if str(spec.dtype).removeprefix("torch.") not in capability.formats:
            return Verdict.refuse(f"{capability.architecture} has no products of {spec.dtype}")
        if spec.head_size not in _HEAD_SIZES:
            return Verdict.refuse(
                f"takes heads of {', '.join(map(str, _HEAD_SIZES))}, got {spec.head_size}"
            )
        if spec.cache_dtype in _OF_8_BITS:
            if spec.head_scales:
                return Verdict.refuse("takes one scale for all heads of a cache, got one per head")
            spec = replace(spec, cache_dtype=spec.dtype)
        # What cannot be had by installing it, is said first.
        return spec.judge_plain_decoder() and FLASHINFER.judge()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> FlashInferPlan:
        """Let the package plan the step; it waits for the device."""
        self._number += 1
        if not len(batch.slots):
            return FlashInferPlan(batch.slots, None, self._number)
        spec = self.spec
        pages = FlashInferPages.of(batch.page_table, batch.seq_lens, spec.page_size)
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.page_size)
        facts = {
            "sm_scale": spec.scale,
            "window_left": window_ends(spec)[0],
            "logits_soft_cap": spec.softcap,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.cache_dtype,
        }
        if batch.max_query_tokens == 1 and len(batch.slots) == len(batch.seq_lens):
            wrapper = self._wrapper("BatchDecodeWithPagedKVCacheWrapper", batch.slots.device)
            wrapper.plan(*pages, *sizes, **facts)
        else:
            wrapper = self._wrapper("BatchPrefillWithPagedKVCacheWrapper", batch.slots.device)
            starts = batch.query_starts.to(torch.int32)
            wrapper.plan(starts, *pages, *sizes, causal=True, **facts)
        return FlashInferPlan(batch.slots, wrapper, self._number)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlashInferPlan,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``.

        Raises: RequestError: the plan is not the last one.
        """
        return self._attend(query, key, value, cache, plan, (), {})

    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        """Return the arguments of the kernel that writes the cache, and the scales as numbers."""
        numbers = {"k_scale": key_scale.item(), "v_scale": value_scale.item()}
        return self._writer.prepared(key_scale, value_scale), numbers

    def forward_quantized(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlashInferPlan,
        scales: Any,
    ) -> torch.Tensor:
        """Round and write, then attend; see ``AttentionBackend.forward_quantized``.

        Raises: RequestError: the plan is not the last one.
        """
        return self._attend(query, key, value, cache, plan, *scales)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlashInferPlan,
        rounding: tuple[Any, ...],
        scales: dict[str, float],
    ) -> torch.Tensor:
        if plan.number != self._number:
            raise RequestError(
                f"the plan is number {plan.number} of this backend, whose wrapper holds number "
                f"{self._number}. Try: plan a step after the layers of the one before have run"
            )
        keys, values = cache.unbind(0)
        self._writer.store(key, value, keys, values, plan.slots, *rounding)
        if plan.wrapper is None:
            return torch.empty_like(query)
        out: torch.Tensor = plan.wrapper.run(query.contiguous(), (keys, values), **scales)
        return out

    def _wrapper(self, name: str, device: torch.device) -> Any:
        """Return the wrapper of that name; both share a workspace, as steps follow each other."""
        if name not in self._wrappers:
            if self._workspace is None:
                # Some of its kernels count in it, from 0 on.
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            facts: dict[str, Any] = {"kv_layout": "NHD"}
            if self.spec.is_quantized:
                # Its kernels for Hopper want queries of 8 bits for such a cache.
                facts["backend"] = "fa2"
            if "Decode" in name:
                # Others are compiled for groups of some sizes only.
                facts["use_tensor_cores"] = self.spec.num_heads != self.spec.num_kv_heads
            self._wrappers[name] = getattr(self._package, name)(self._workspace, **facts)
        return self._wrappers[name]
