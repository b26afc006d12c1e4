"""Attention over the paged cache, and the backends made of the standard ops.

Dimensions: T tokens, N heads, C latent size, R rotary size, P pages, S page size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

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
from interposer_ops.attention._alibi import alibi_slopes
from interposer_ops.attention._decoder_backend import DecoderBackend
from interposer_ops.attention._paged_attention import paged_attention
from interposer_ops.attention._source_attention import judge_source, lone_queries
from interposer_ops.caches import write_latent_cache
from interposer_ops.latent_attention import latent_attention_decode

__all__ = ["Attention", "LatentBackend", "PagedBackend"]

_SCALES = ("k_scale", "v_scale")


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
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: object
    ) -> Tensor:
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


class PagedBackend(DecoderBackend):
    """Decoder attention from ``paged_attention`` and the ops that write its cache.

    Besides what others take it takes ``alibi``, ``prefix_lm``, and attention to sources.
    """

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        scales = {"scaled": spec.is_quantized, "per_head": spec.head_scales}
        self.attend = site.bind(paged_attention, **spec.dims(), **scales, causal=True)
        self.slopes: Tensor | None = None
        if spec.alibi:
            device = site.resolver.device.torch_device
            self.slopes = alibi_slopes(spec.num_heads, device, spec.alibi_bias_max)
        super().__init__(spec, site)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept what ``DecoderBackend`` does, with slopes, prefixes or neither, and sources."""
        if spec.type == "encoder_decoder":
            return judge_source(spec)
        return super().accepts(replace(spec, alibi=False, prefix_lm=False), capability)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch as it is; for sources, with its queries one by one."""
        return lone_queries(batch) if self.spec.type == "encoder_decoder" else batch

    def attend_to(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionBatch,
        sinks: Tensor | None,
        scales: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Return what the op does; see ``DecoderBackend.attend_to``."""
        batch = plan.page_table, plan.query_starts, plan.seq_lens, plan.max_query_tokens
        scores = self.spec.scale, True, self.spec.window_tokens, self.spec.softcap
        biases = sinks, self.slopes, plan.prefix_lens if self.spec.prefix_lm else None
        return self.attend(query, keys, values, *batch, *scores, *biases, *scales)


class LatentBackend(AttentionBackend):
    """Store one vector per token, and attend to these by the op ``latent_attention_decode``.

    Prompts, chunks of them and decode steps are one call, as the op takes queries of any length.
    Where a platform has a function for some of the steps, a subclass plans these with ``slots`` and
    whatever its ``attend`` needs, and gives the others to this.
    """

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        sizes = {
            "latent_size": spec.latent_size,
            "rotary_size": spec.head_size - spec.latent_size,
            "page_size": spec.page_size,
        }
        stored = str(spec.cache_dtype).removeprefix("torch.")
        self._write = site.bind(write_latent_cache, **sizes)
        self._attend = site.bind(
            latent_attention_decode,
            **sizes,
            num_heads=spec.num_heads,
            cache_dtype=stored,
            scaled=False,
        )

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders whose heads share one vector per token, of the model's dtype."""
        if not spec.latent:
            return Verdict.refuse("serves latent attention only")
        verdict = replace(spec, latent=False).judge_plain_decoder()
        if not verdict:
            return verdict
        if spec.window_tokens is not None or spec.softcap is not None:
            return Verdict.refuse("has neither windows nor a softcap")
        if spec.num_kv_heads != 1:
            return Verdict.refuse(f"needs one vector per token, got {spec.num_kv_heads} kv heads")
        if not 0 < spec.latent_size <= spec.head_size:
            sizes = f"{spec.latent_size} of {spec.head_size}"
            return Verdict.refuse(f"needs values that are a part of the vector, got {sizes}")
        return Verdict.accept()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[P, S, C + R]``."""
        page_shape = (self.spec.page_size, self.spec.head_size)
        return KVCacheLayout(page_shape, 0, (0, 1, 2), self.spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> Any:
        """Return the batch as it is."""
        return batch

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        """Write the vectors, then attend to them.

        Args:
            query: ``[T, N, C + R]``.
            key: ``[T, 1, C + R]``; its first C elements are ``value``, which is not read.
        Returns: ``[T, N, C]``, dtype of ``query``.
        """
        self.write(key, cache, plan.slots)
        return self.attend(query, cache, plan)

    def attend(self, query: Tensor, cache: Tensor, plan: Any) -> Tensor:
        """Return ``[T, N, C]`` of queries ``[T, N, C + R]`` to what is in the cache."""
        places = plan.page_table, plan.query_starts, plan.seq_lens, plan.max_query_tokens
        return self._attend(query, cache, *places, self.spec.latent_size, self.spec.scale)

    def write(self, vectors: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store vectors ``[T, 1, C + R]`` at ``slots`` ``[T]`` int64."""
        size = self.spec.latent_size
        self._write(vectors[:, 0, :size], vectors[:, 0, size:], cache, slots)
