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
from interposer_ops.attention._paged_attention import paged_attention
from interposer_ops.caches._cache_writer import CacheWriter

__all__ = ["Attention", "PagedBackend"]

_SCALES = ("k_scale", "v_scale")
_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


class Attention(PluggableLayer):
    """Write a step's keys and values to this layer's cache and attend to the sequence."""

    layer_id = "attention"

    def __init__(self, site: Site, spec: AttentionSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.backend: AttentionBackend = site.resolver.attention(spec, site)
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
        self.attend = site.bind(paged_attention, **spec.dims())
        self._writer = CacheWriter(spec, site)
        self.write = self._writer.store

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders whose cache is of their dtype or of 8 bits, with or without sinks."""
        if spec.cache_dtype in _OF_8_BITS:
            spec = replace(spec, cache_dtype=spec.dtype)
        return replace(spec, sinks=False).judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

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
        return self._attend(query, key, value, cache, plan)

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

    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        """Return the scales, and what the kernel that writes the cache wants besides."""
        return (key_scale, value_scale), self._writer.prepared(key_scale, value_scale)

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
        return self._attend(query, key, value, cache, plan, None, *scales)

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
        return self._attend(query, key, value, cache, plan, sinks, *scales)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
        sinks: torch.Tensor | None = None,
        scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        rounding: tuple[Any, ...] = (),
    ) -> torch.Tensor:
        keys, values = cache.unbind(0)
        self.write(key, value, keys, values, plan.slots, *rounding)
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
            *scales,
        )
