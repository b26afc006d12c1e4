"""Decoder attention through FlashInfer, where it is installed.

Its two halves, ``plan`` once per step and ``run`` once per layer, are those of this contract. It
plans on the host, with the lengths that come along with a batch, and a wrapper holds the plan that
it made last, so that an older one is refused. A graph has a wrapper of its own, whose buffers stay
where they are. It compiles its kernels when it first plans, for which it needs nvcc, or the package
flashinfer-jit-cache.

Arguments are tested on the processor against classes of the same meaning; on a GPU it was not run.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
Source: ``BatchDecodeWithPagedKVCacheWrapper`` and ``BatchPrefillWithPagedKVCacheWrapper`` in
flashinfer/decode.py and prefill.py of flashinfer-ai/flashinfer: starts, pages and lengths in int32,
a causal mask that is aligned to the last query and key, a window of tokens to the left of the
query's own, scales of a cache of 8 bits as numbers. ``use_cuda_graph`` and the three buffers
there: one batch size for each wrapper, as many indices as its buffer holds, and a plan before each
replay, whose starts and lengths it wants on the host.
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
_DECODE, _PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"


class FlashInferPlan(NamedTuple):
    """A step that a wrapper has planned.

    Attributes:
        slots: ``[T]`` int64.
        wrapper: None where there is nothing to attend to.
        number: of the plan among those of the backend; None where the wrapper is the plan's own.
    """

    slots: torch.Tensor
    wrapper: Any
    number: int | None


class FlashInferBackend(AttentionBackend):
    """Writes with the op's kernel, attends with the package's wrappers."""

    plans_on_host = True

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._writer = CacheWriter(spec, site)
        self._wrappers: dict[str, Any] = {}
        self._workspace: torch.Tensor | None = None
        self._number = 0
        self._sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.page_size)
        self._facts = {
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
        """Let the package plan the step, with what the host knows of it."""
        self._number += 1
        if not len(batch.slots):
            return FlashInferPlan(batch.slots, None, self._number)
        device = batch.slots.device
        if batch.max_query_tokens == 1 and len(batch.slots) == len(batch.seq_lens):
            wrapper = self._wrapper(_DECODE, device)
            wrapper.plan(*self._pages(batch), *self._sizes, **self._facts)
        else:
            wrapper = self._wrapper(_PREFILL, device)
            starts = batch.on_host().query_starts.to(torch.int32)
            pages = self._pages(batch)
            wrapper.plan(starts, *pages, *self._sizes, causal=True, **self._facts)
        return FlashInferPlan(batch.slots, wrapper, self._number)

    def plan_fixed(self, batch: AttentionBatch) -> FlashInferPlan:
        """Return a plan with a wrapper, and buffers that it reads, of its own."""
        device, (size, most_pages) = batch.slots.device, batch.page_table.shape
        sizes = {"indptr": size + 1, "indices": size * most_pages, "last_page_len": size}
        buffers = {
            f"paged_kv_{name}_buffer": torch.zeros(count, dtype=torch.int32, device=device)
            for name, count in sizes.items()
        }
        wrapper = self._made(_DECODE, device, use_cuda_graph=True, **buffers)
        plan = FlashInferPlan(batch.slots, wrapper, None)
        self.update_plan(plan, batch)
        return plan

    def update_plan(self, plan: FlashInferPlan, batch: AttentionBatch) -> None:
        """Let the package plan into the buffers of the plan; nothing is waited for."""
        plan.wrapper.plan(*self._pages(batch), *self._sizes, **self._facts)

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
        if plan.number not in (None, self._number):
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

    def _pages(self, batch: AttentionBatch) -> FlashInferPages:
        host = batch.on_host()
        pages = FlashInferPages.of(host.page_table, host.seq_lens, self.spec.page_size)
        return pages.indexed_on(batch.slots.device)

    def _wrapper(self, name: str, device: torch.device) -> Any:
        """Return the wrapper of that name for steps that are not captured."""
        if name not in self._wrappers:
            self._wrappers[name] = self._made(name, device)
        return self._wrappers[name]

    def _made(self, name: str, device: torch.device, **facts: Any) -> Any:
        """Return a new wrapper; all share a workspace, as steps follow each other."""
        if self._workspace is None:
            # Some of its kernels count in it, from 0 on.
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if self.spec.is_quantized:
            # Its kernels for Hopper want queries of 8 bits for such a cache.
            facts["backend"] = "fa2"
        if name == _DECODE:
            # Others are compiled for groups of some sizes only.
            facts["use_tensor_cores"] = self.spec.num_heads != self.spec.num_kv_heads
        return getattr(self._package, name)(self._workspace, kv_layout="NHD", **facts)
