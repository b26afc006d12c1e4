"""Base class of the compiled library's paged attention backends.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch

from interposer import (
    AttentionBackend,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from interposer_cpu import native
from interposer_cpu._kernels.interface import CACHE_TYPES, TYPES, float64_bits


class NativePagedBackend(AttentionBackend):
    """Base of native paged attention, with sinks and quantized caches; lacks ``forward``, ``plan``.

    Attributes:
        rounded_dtypes: cache dtypes that are accepted in addition to the dtype of the spec.
    """

    rounded_dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
    )

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        # Strides of a query, key or value whose heads are adjacent; tokens may have gaps.
        self._head_strides = (spec.head_size, 1)
        self._facts = (
            TYPES[spec.dtype],
            CACHE_TYPES[spec.cache_dtype],
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.page_size,
            float64_bits(spec.scale),
            float64_bits(spec.softcap or 0.0),
            spec.window_tokens or 0,
        )

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders of supported sizes, cached in the model's dtype or ``rounded_dtypes``.

        Cross-attention to an encoder input is accepted if ``forward`` takes ``stored``.
        """
        if spec.dtype not in TYPES:
            return Verdict.refuse(f"computes in 32 or 16 bit floats, got {spec.dtype}")
        verdict = cls._judge_sizes(spec)
        if not verdict:
            return verdict
        if spec.cache_dtype not in (spec.dtype, *cls.rounded_dtypes):
            *names, last = (str(dtype).removeprefix("torch.") for dtype in cls.rounded_dtypes)
            return Verdict.refuse(
                f"stores the cache as {spec.dtype}, {', '.join(names)} or {last}, "
                f"requested {spec.cache_dtype}"
            )
        reads_stored = cls.takes("stored")
        shared = spec.shared and not reads_stored
        # Sinks and quantized caches are supported: check the rest of the spec without them.
        plain = replace(spec, cache_dtype=spec.dtype, sinks=False, shared=shared)
        if spec.type == "encoder_decoder" and reads_stored:
            if spec.window_tokens is not None:
                return Verdict.refuse("has no windows over encoder inputs")
            plain = replace(spec, type="decoder")
        verdict = plain.judge_plain_decoder()
        return native.judge_device(capability) if verdict else verdict

    @classmethod
    @abstractmethod
    def _judge_sizes(cls, spec: AttentionSpec) -> Verdict:
        """Accept or refuse the head size and page size of the spec."""

    def kv_layout(self) -> KVCacheLayout:
        """Define the layout ``[K, P, 2, S, D]``, in memory ``[P, L, K, 2, S, D]`` for L layers.

        The keys of one kv head in a page are adjacent. A page of all layers is one block of memory,
        and pages are allocated in order. So the cache takes physical memory only for stored
        tokens, even with huge pages, as a huge page holds few cache pages.
        """
        spec = self.spec
        page_shape = (spec.num_kv_heads, 2, spec.page_size, spec.head_size)
        return KVCacheLayout(page_shape, 1, (1, 0, 2, 3, 4), spec.cache_dtype, layers_axis=1)

    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        """Stack the scales in one tensor ``[2, 1]`` or ``[2, K]``, float32."""
        return torch.stack((key_scale, value_scale)).float()
