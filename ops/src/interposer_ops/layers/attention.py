"""Attention layer over a paged cache, and attention backends built from the standard ops.

Dimensions: T tokens, N heads, K kv heads, D head size, C latent size, R rotary size, P pages, S
page size.
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
    """Attention layer: store a step's keys and values in the layer's cache, then attend."""

    layer_id = "attention"

    def __init__(self, site: Site, spec: AttentionSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.backend: AttentionBackend = site.resolver.attention(spec, site)
        self.scales: Any = None
        # A user's choice of 8 bits does not depend on the checkpoint, which has no scales for it.
        self._is_scaled = spec.is_quantized and site.resolver.config.kv_cache == "auto"
        if self._is_scaled:
            # Checkpoints store scales and sinks next to the projections, one level up.
            parent, scheme = site.prefix.rpartition(".")[0], site.resolver.scheme
            cache_format = scheme.cache_format(parent) if scheme else None
            names = cache_format.scale_names if cache_format else _SCALES
            self.scale_names = tuple(f"{parent}.{name}" for name in names)
            for name, full_name in zip(_SCALES, self.scale_names, strict=True):
                scales = torch.empty(spec.num_kv_heads if spec.head_scales else 1)
                scale = nn.Parameter(scales, requires_grad=False)
                scale.stored_as = full_name  # type: ignore[attr-defined]
                self.register_parameter(name, scale)
        if spec.sinks:
            parent = site.prefix.rpartition(".")[0]
            sinks = nn.Parameter(torch.empty(spec.num_heads, dtype=spec.dtype), requires_grad=False)
            self.sinks_name = f"{parent}.sinks" if parent else "sinks"
            sinks.stored_as = self.sinks_name  # type: ignore[attr-defined]
            self.register_parameter("sinks", sinks)

    def finalize(self) -> None:
        """Validate the loaded scales and sinks, and prepare the scales for the backend.

        Raises: CheckpointError: a scale is not positive and finite, or a sink is not finite.
        """
        if self.spec.sinks and not self.get_parameter("sinks").isfinite().all():
            raise CheckpointError(
                self.sinks_name,
                "holds a score that is infinite or not a number",
                "copy the checkpoint again",
            )
        if not self.spec.is_quantized:
            return
        if not self._is_scaled:
            one = torch.ones(self.spec.num_kv_heads if self.spec.head_scales else 1)
            self.scales = self.backend.prepare_scales(one, one)
            return
        scales = [self.get_parameter(name).data for name in _SCALES]
        for name, scale in zip(self.scale_names, scales, strict=True):
            invalid = scale[~(scale.isfinite() & (scale > 0))]
            if invalid.numel():
                raise CheckpointError(
                    name,
                    f"holds the scale {invalid[0].item()}, must be positive and finite",
                    "quantize the model again",
                )
        self.scales = self.backend.prepare_scales(*scales)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: object
    ) -> Tensor:
        """Compute attention ``[T, N, D]`` of this step's tokens.

        Args:
            query: ``[T, N, D]``.
            key, value: ``[T, K, D]``.
            cache: the layer's cache, in the layout of the backend.
            plan: the value that the backend's ``plan`` returned for this step.
        """
        return self.backend.forward(query, key, value, cache, plan, **self._options())

    def read(self, query: Tensor, cache: Tensor, plan: object) -> Tensor:
        """Compute attention ``[T, N, D]`` to the cached keys and values; store no new ones."""
        nothing = query[:0, : self.spec.num_kv_heads]
        options = self._options(stored=True)
        return self.backend.forward(query, nothing, nothing, cache, plan, **options)

    def _options(self, **options: Any) -> dict[str, Any]:
        """Add the scales and sinks that the spec needs to the backend's ``options``."""
        if self.scales is not None:
            options["scales"] = self.scales
        if self.spec.sinks:
            options["sinks"] = self.get_parameter("sinks")
        return options


class PagedBackend(DecoderBackend):
    """Decoder attention by the op ``paged_attention``; other ops write the cache.

    In addition to ``DecoderBackend`` this backend supports ``alibi``, ``prefix_lm`` and attention
    to encoder inputs.
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
        """Accept the specs of ``DecoderBackend``, also with ALiBi, prefix LM or encoder inputs."""
        if spec.type == "encoder_decoder":
            return judge_source(spec)
        return super().accepts(replace(spec, alibi=False, prefix_lm=False), capability)

    # ``paged_attention`` takes the batch itself; only cross attention needs another one.
    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch; for encoder inputs, one sequence per query."""
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
        """Call ``paged_attention``; see ``DecoderBackend.attend_to``."""
        batch = plan.page_table, plan.query_starts, plan.seq_lens, plan.max_query_tokens
        scores = self.spec.scale, True, self.spec.window_tokens, self.spec.softcap
        biases = sinks, self.slopes, plan.prefix_lens if self.spec.prefix_lm else None
        return self.attend(query, keys, values, *batch, *scores, *biases, *scales)


class LatentBackend(AttentionBackend):
    """Multi-head latent attention: store one vector per token, shared by all heads.

    One call of ``latent_attention_decode`` serves prompts, chunks and decode steps, because the op
    takes queries of any length. A platform with a faster function for some steps subclasses this
    class. For such steps the ``plan`` of the subclass returns an object with ``slots`` and all
    arguments of ``attend``; other steps use the methods of this class.

    Attributes:
        write_kernel, attend_kernel: kernels of ``write_latent_cache`` and
            ``latent_attention_decode``.
    """

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        sizes = {
            "latent_size": spec.latent_size,
            "rotary_size": spec.head_size - spec.latent_size,
            "page_size": spec.page_size,
        }
        cache_dtype = str(spec.cache_dtype).removeprefix("torch.")
        self.write_kernel = site.bind(write_latent_cache, **sizes)
        self.attend_kernel = site.bind(
            latent_attention_decode,
            **sizes,
            num_heads=spec.num_heads,
            cache_dtype=cache_dtype,
            scaled=False,
        )

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders whose heads share one vector per token, stored in the model's dtype."""
        if not spec.latent:
            return Verdict.refuse("serves latent attention only")
        # Apart from latent heads the same features are refused as for plain decoders.
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
        """Describe the cache of one layer, ``[P, S, C + R]``."""
        page_shape = (self.spec.page_size, self.spec.head_size)
        return KVCacheLayout(page_shape, 0, (0, 1, 2), self.spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> Any:
        """Return the batch unchanged."""
        return batch

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        """Write this step's vectors to the cache, then attend to the whole sequence.

        Args:
            query: ``[T, N, C + R]``.
            key: ``[T, 1, C + R]``; the first C elements are the values, so ``value`` is not read.
        Returns: ``[T, N, C]``, dtype of ``query``.
        """
        self.write(key, cache, plan.slots)
        return self.attend(query, cache, plan)

    def attend(self, query: Tensor, cache: Tensor, plan: Any) -> Tensor:
        """Compute attention ``[T, N, C]`` of queries ``[T, N, C + R]`` to the cached vectors."""
        sequences = plan.page_table, plan.query_starts, plan.seq_lens, plan.max_query_tokens
        return self.attend_kernel(query, cache, *sequences, self.spec.latent_size, self.spec.scale)

    def write(self, vectors: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store vectors ``[T, 1, C + R]`` in the cache at ``slots`` ``[T]`` int64."""
        size = self.spec.latent_size
        self.write_kernel(vectors[:, 0, :size], vectors[:, 0, size:], cache, slots)
