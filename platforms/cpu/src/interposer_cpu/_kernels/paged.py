"""What the compiled library's attention over a paged cache has in common, however pages lie.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import Any

import torch

from interposer import AttentionBackend, AttentionSpec, KVCacheLayout


class NativePagedBackend(AttentionBackend):
    """Writes, then attends, by one method for caches with and without sinks and scales."""

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[K, P, 2, S, D]``: what one kv head reads lies together."""
        spec = self.spec
        page_shape = (spec.num_kv_heads, 2, spec.page_size, spec.head_size)
        return KVCacheLayout(page_shape, 1, (0, 1, 2, 3, 4), spec.cache_dtype)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        return self._forward(query, key, value, cache, plan)

    def forward_with_sinks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward_with_sinks``."""
        return self._forward(query, key, value, cache, plan, sinks=sinks)

    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        """Return the scales as one block of memory ``[2, 1]`` or ``[2, K]``."""
        return torch.stack((key_scale, value_scale)).float()

    def forward_quantized(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        scales: torch.Tensor,
    ) -> torch.Tensor:
        """Round and write, then attend; see ``AttentionBackend.forward_quantized``."""
        return self._forward(query, key, value, cache, plan, scales=scales)

    def forward_quantized_with_sinks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        scales: torch.Tensor,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Do both; see ``AttentionBackend.forward_quantized_with_sinks``."""
        return self._forward(query, key, value, cache, plan, sinks=sinks, scales=scales)

    @abstractmethod
    def _forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        sinks: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``[T, N, D]`` after key and value were stored.

        Args:
            sinks: ``[N]``.
            scales: ``[2, 1]`` or ``[2, K]``, as ``prepare_scales`` returns them.
        """


def facts_of(spec: AttentionSpec, dtype: int, cache_dtype: int) -> tuple[int, ...]:
    """Return what the library's calls take of a specification.

    Args:
        dtype, cache_dtype: their numbers in the library's C interface.
    """
    return (
        dtype,
        cache_dtype,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_size,
        spec.page_size,
        _bits(spec.scale),
        _bits(spec.softcap or 0.0),
        spec.window_tokens or 0,
    )


def _bits(number: float) -> int:
    """Return the bits of a float64, as an int64."""
    (bits,) = struct.unpack("=q", struct.pack("=d", number))
    return int(bits)
