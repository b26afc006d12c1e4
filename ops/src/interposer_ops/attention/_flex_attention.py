"""Decoder attention through torch's FlexAttention, for what fixed kernels cannot do together.

It takes windows, softcap, sinks and caches of 8 bits in any combination, on copies of what is read
of the cache, and waits for the host once per step.

On an accelerator it is compiled when it is first called, for which Triton is needed, and again for
steps of one query or of few tokens and for layers of another kind. Where these are more forms than
``torch._dynamo.config.recompile_limit``, torch runs what is not compiled. It is never compiled to
a graph, and a step that is captured as one refuses it, since it does not promise to be safe there.

Results are tested on the processor, in torch's form that is not compiled; on an accelerator it was
not run.

Dimensions: T tokens, N heads, K kv heads, D head size, L cached tokens that are read.
Source: arXiv:2412.05496; torch.nn.attention.flex_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from interposer_ops.attention._flex_plan import FlexPlan, make_plan
from interposer_ops.caches._cache_writer import CacheWriter
from interposer_ops.caches._fp8_cache import gather_cache_fp8
from interposer_ops.caches._int8_cache import gather_cache_int8
from interposer_ops.caches._kv_cache import gather_cache

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_LEAST_HEAD = 16
_GATHERED = ("num_kv_heads", "head_size", "page_size")


class FlexBackend(AttentionBackend):
    """All sequences are rows of one product, whose mask keeps them apart."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._writer = CacheWriter(spec, site)
        facts = spec.dims()
        dims = {name: facts[name] for name in _GATHERED}
        op: Any = gather_cache
        if spec.is_quantized:
            is_float = spec.cache_dtype.is_floating_point
            op = gather_cache_fp8 if is_float else gather_cache_int8
            dims |= {"per_head": spec.head_scales}
            dims |= {"cache_dtype": facts["cache_dtype"]} if is_float else {}
        self._gather: Any = site.bind_kernel(op, **dims)
        self._cap = None if spec.softcap is None else _capped(spec.softcap)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders, with or without sinks, whose cache is of their dtype or of 8 bits."""
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 32 or 16 bit floats, got {spec.dtype}")
        if spec.head_size < _LEAST_HEAD:
            return Verdict.refuse(f"takes heads of {_LEAST_HEAD} or more, got {spec.head_size}")
        if spec.cache_dtype in _OF_8_BITS:
            spec = replace(spec, cache_dtype=spec.dtype)
        return replace(spec, sinks=False).judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> FlexPlan:
        """Return what is read and which of it each token sees, on the device."""
        return make_plan(batch, self.spec.window_tokens)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlexPlan,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        return self._attend(query, key, value, cache, plan)

    def forward_with_sinks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlexPlan,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward_with_sinks``."""
        return self._attend(query, key, value, cache, plan, sinks)

    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        """Return what the kernels that write and read the cache want of the scales."""
        read = [self._gather.prepared(scale=scale)["scale"] for scale in (key_scale, value_scale)]
        return self._writer.prepared(key_scale, value_scale), read

    def forward_quantized(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlexPlan,
        scales: Any,
    ) -> torch.Tensor:
        """Round and write, then attend; see ``AttentionBackend.forward_quantized``."""
        return self._attend(query, key, value, cache, plan, None, scales)

    def forward_quantized_with_sinks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlexPlan,
        scales: Any,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Do both; see ``AttentionBackend.forward_quantized_with_sinks``."""
        return self._attend(query, key, value, cache, plan, sinks, scales)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlexPlan,
        sinks: torch.Tensor | None = None,
        scales: Any = None,
    ) -> torch.Tensor:
        rounding, read = ((), (None, None)) if scales is None else scales
        self._writer.store(key, value, *cache.unbind(0), plan.slots, *rounding)
        if plan.mask is None:
            return torch.empty_like(query)
        keys, values = (self._read(c, plan, s) for c, s in zip(cache, read, strict=True))
        out, aux = _function(query.device.type)(
            query.transpose(0, 1)[None],
            keys,
            values,
            score_mod=self._cap,
            block_mask=plan.mask,
            scale=self.spec.scale,
            enable_gqa=self.spec.num_heads != self.spec.num_kv_heads,
            return_aux=AuxRequest(lse=True),
        )
        if sinks is not None:
            # A score without a value takes its share of the weights: e^s / (e^lse + e^s).
            share = torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse.dtype))
            out = out * share[..., None]
        rows: torch.Tensor = out[0].transpose(0, 1).to(query.dtype)
        return rows

    def _read(
        self, cache: torch.Tensor, plan: FlexPlan, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``[1, K, L, D]`` of a cache ``[P, S, K, D]``, in the spec's dtype."""
        given = (cache, plan.page_table, plan.lengths, plan.firsts)
        if scale is None:
            rows = self._gather.function(*given, plan.num_keys)
        else:
            rows = self._gather.function(*given, scale, plan.num_keys, self.spec.dtype)
        heads: torch.Tensor = rows.transpose(0, 1)[None]
        return heads


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(score: torch.Tensor, *_places: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _function(device_type: str) -> Any:
    """Return the function for a device; the processor's needs no compiler, and is for tests."""
    if device_type == "cpu":
        return flex_attention
    # Whatever the process has set for others: a graph in a graph would write to foreign memory.
    return torch.compile(flex_attention, dynamic=True, options={"triton.cudagraphs": False})
