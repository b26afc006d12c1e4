"""Attention over the paged cache, and the backend made of the standard ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    PluggableLayer,
    Site,
    Verdict,
)
from interposer.errors import CheckpointError
from interposer_ops.attention import paged_attention
from interposer_ops.fp8_cache import reshape_and_cache_fp8
from interposer_ops.int8_cache import reshape_and_cache_int8
from interposer_ops.kv_cache import reshape_and_cache

__all__ = ["Attention", "PagedBackend"]

_SCALES = ("k_scale", "v_scale")
_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)

# The dims of ``reshape_and_cache``, and those of the ops that round which a spec knows.
_WRITTEN = ("num_heads", "num_kv_heads", "head_size", "page_size", "windowed", "softcapped")
_ROUNDED = ("num_kv_heads", "head_size", "page_size")


class Attention(PluggableLayer):
    """Write a step's keys and values to this layer's cache and attend to the sequence."""

    layer_id = "attention"

    def __init__(self, site: Site, spec: AttentionSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.backend = site.resolver.attention(spec, site)
        self.scales: Any = None
        if spec.is_quantized:
            place, scheme = site.prefix.rpartition(".")[0], site.resolver.scheme
            stored = scheme.cache_format(place) if scheme else None
            names = stored.scale_names if stored else _SCALES
            self.scale_names = tuple(f"{place}.{name}" for name in names)
            for name, full_name in zip(_SCALES, self.scale_names, strict=True):
                numbers = torch.empty(spec.num_kv_heads if spec.head_scales else 1)
                scale = nn.Parameter(numbers, requires_grad=False)
                scale.stored_as = full_name  # type: ignore[attr-defined]
                self.register_parameter(name, scale)
        if spec.sinks:
            place = site.prefix.rpartition(".")[0]
            sinks = nn.Parameter(torch.empty(spec.num_heads, dtype=spec.dtype), requires_grad=False)
            self.sinks_name = f"{place}.sinks" if place else "sinks"
            sinks.stored_as = self.sinks_name  # type: ignore[attr-defined]
            self.register_parameter("sinks", sinks)

    def finalize(self) -> None:
        """Prepare the scales of a quantized cache.

        Raises: CheckpointError: one is not a positive finite number, or a sink is none.
        """
        if self.spec.sinks and not self.get_parameter("sinks").isfinite().all():
            raise CheckpointError(
                self.sinks_name,
                "holds a score that is infinite or not a number",
                "copy the checkpoint again",
            )
        if not self.spec.is_quantized:
            return
        scales = [self.get_parameter(name).data for name in _SCALES]
        for name, scale in zip(self.scale_names, scales, strict=True):
            wrong = scale[~(scale.isfinite() & (scale > 0))]
            if wrong.numel():
                raise CheckpointError(
                    name,
                    f"holds the scale {wrong[0].item()}, must be positive and finite",
                    "quantize the model again",
                )
        self.scales = self.backend.prepare_scales(*scales)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: object,
    ) -> torch.Tensor:
        """Return ``[T, N, D]``; ``plan`` is the backend's for this step."""
        if self.spec.sinks:
            sinks = self.get_parameter("sinks")
            if self.scales is None:
                return self.backend.forward_with_sinks(query, key, value, cache, plan, sinks)
            return self.backend.forward_quantized_with_sinks(
                query, key, value, cache, plan, self.scales, sinks
            )
        if self.scales is None:
            return self.backend.forward(query, key, value, cache, plan)
        return self.backend.forward_quantized(query, key, value, cache, plan, self.scales)


class PagedBackend(AttentionBackend):
    """Decoder attention from ``paged_attention`` and the ops that write its cache."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        facts = spec.dims()
        self.attend = site.bind(paged_attention, **facts)
        if spec.is_quantized:
            dims = {name: facts[name] for name in _ROUNDED}
            is_float = spec.cache_dtype.is_floating_point
            rounds: Any = reshape_and_cache_fp8 if is_float else reshape_and_cache_int8
            if is_float:
                dims["cache_dtype"] = facts["cache_dtype"]
            self.round: Any = site.bind_kernel(rounds, **dims, per_head=spec.head_scales)
            # What the op is called with behind the scales.
            self.rounded_to = (spec.cache_dtype,) if is_float else ()
        else:
            self.write = site.bind(reshape_and_cache, **{name: facts[name] for name in _WRITTEN})

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders whose cache is of their dtype or of 8 bits, with or without sinks."""
        if spec.cache_dtype in _OF_8_BITS:
            spec = replace(spec, cache_dtype=spec.dtype)
        return replace(spec, sinks=False).judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        spec = self.spec
        page_shape = (2, spec.page_size, spec.num_kv_heads, spec.head_size)
        return KVCacheLayout(page_shape, 1, (0, 1, 2, 3, 4), spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch as it is."""
        return batch

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        return self._attend(query, key, value, cache, plan, None)

    def forward_with_sinks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward_with_sinks``."""
        return self._attend(query, key, value, cache, plan, sinks)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        keys, values = cache.unbind(0)
        self.write(key, value, keys, values, plan.slots)
        return self.attend(
            query,
            keys,
            values,
            plan.page_table,
            plan.query_starts,
            plan.seq_lens,
            plan.max_query_tokens,
            self.spec.scale,
            True,
            self.spec.window_tokens,
            self.spec.softcap,
            sinks,
        )

    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        """Return the scales, and what the kernel that writes the cache wants instead."""
        wanted = self.round.prepared(key_scale=key_scale, value_scale=value_scale)
        return key_scale, value_scale, wanted["key_scale"], wanted["value_scale"]

    def forward_quantized(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
        scales: Any,
    ) -> torch.Tensor:
        """Round and write, then attend; see ``AttentionBackend.forward_quantized``."""
        return self._attend_rounded(query, key, value, cache, plan, scales, None)

    def forward_quantized_with_sinks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
        scales: Any,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Do both; see ``AttentionBackend.forward_quantized_with_sinks``."""
        return self._attend_rounded(query, key, value, cache, plan, scales, sinks)

    def _attend_rounded(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
        scales: Any,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        keys, values = cache.unbind(0)
        key_scale, value_scale, *prepared = scales
        wanted: Any = (*prepared, *self.rounded_to)
        self.round.function(key, value, keys, values, plan.slots, *wanted)
        return self.attend(
            query,
            keys,
            values,
            plan.page_table,
            plan.query_starts,
            plan.seq_lens,
            plan.max_query_tokens,
            self.spec.scale,
            True,
            self.spec.window_tokens,
            self.spec.softcap,
            sinks,
            None,
            None,
            key_scale,
            value_scale,
        )
