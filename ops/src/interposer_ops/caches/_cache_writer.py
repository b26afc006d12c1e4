"""Storing a step's keys and values in a paged cache of the spec's dtype or of 8 bits.

Dimensions: T tokens, K kv heads, D head size, P pages, S page size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from interposer import AttentionSpec, Site
from interposer_ops.caches._kv_cache import reshape_and_cache
from interposer_ops.caches._quantized_cache import reshape_and_cache_fp8, reshape_and_cache_int8

_WRITE_DIMS = ("num_heads", "num_kv_heads", "head_size", "page_size", "windowed", "softcapped")
_QUANTIZED_DIMS = ("num_kv_heads", "head_size", "page_size", "cache_dtype")


class CacheWriter:
    """The kernel that stores keys and values in the cache of an attention spec.

    Attributes:
        store: called with key and value ``[T, K, D]``, both caches ``[P, S, K, D]``, slots ``[T]``,
            and for a quantized cache also with the values returned by ``prepared``.
    """

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        if not spec.is_quantized:
            dims = spec.dims()
            self.store: Any = site.bind(reshape_and_cache, **{n: dims[n] for n in _WRITE_DIMS})
            return
        is_float = spec.cache_dtype.is_floating_point
        op: Any = reshape_and_cache_fp8 if is_float else reshape_and_cache_int8
        self._kernel: Any = site.bind_kernel(op, **cache_dims(spec))
        self._rounded_to = (spec.cache_dtype,) if is_float else ()
        self.store = self._kernel.function

    def prepared(self, key_scale: Tensor, value_scale: Tensor) -> tuple[Any, ...]:
        """Return the extra arguments of ``store``, for loaded scales ``[1]`` or ``[K]``."""
        constants = self._kernel.prepared(key_scale=key_scale, value_scale=value_scale)
        return constants["key_scale"], constants["value_scale"], *self._rounded_to


def cache_dims(spec: AttentionSpec) -> dict[str, Any]:
    """Return the dims of requests for ops that read or write an attention spec's cache."""
    # The ops for int8 have no dim ``cache_dtype``.
    facts = spec.dims()
    names = (
        _QUANTIZED_DIMS
        if spec.is_quantized and spec.cache_dtype.is_floating_point
        else _QUANTIZED_DIMS[:3]
    )
    scales = {"per_head": spec.head_scales} if spec.is_quantized else {}
    return {name: facts[name] for name in names} | scales
