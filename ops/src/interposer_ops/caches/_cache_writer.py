"""What stores a step's keys and values in a paged cache, of the spec's dtype or rounded to 8 bits.

Dimensions: T tokens, K kv heads, D head size, P pages, S page size.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer import AttentionSpec, Site
from interposer_ops.caches._fp8_cache import reshape_and_cache_fp8
from interposer_ops.caches._int8_cache import reshape_and_cache_int8
from interposer_ops.caches._kv_cache import reshape_and_cache

# The dims of ``reshape_and_cache``, and those of the ops that round which a spec knows.
_WRITTEN = ("num_heads", "num_kv_heads", "head_size", "page_size", "windowed", "softcapped")
_ROUNDED = ("num_kv_heads", "head_size", "page_size")


class CacheWriter:
    """The kernel that the op's selection gives, and what it wants of a layer's scales.

    Attributes:
        store: called with key and value ``[T, K, D]``, both caches ``[P, S, K, D]``, the slots
            ``[T]``, and what ``prepared`` returned if the cache is quantized.
    """

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        facts = spec.dims()
        if not spec.is_quantized:
            self.store: Any = site.bind(
                reshape_and_cache, **{name: facts[name] for name in _WRITTEN}
            )
            return
        dims = {name: facts[name] for name in _ROUNDED}
        is_float = spec.cache_dtype.is_floating_point
        op: Any = reshape_and_cache_fp8 if is_float else reshape_and_cache_int8
        if is_float:
            dims["cache_dtype"] = facts["cache_dtype"]
        self._kernel: Any = site.bind_kernel(op, **dims, per_head=spec.head_scales)
        self._rounded_to = (spec.cache_dtype,) if is_float else ()
        self.store = self._kernel.function

    def prepared(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> tuple[Any, ...]:
        """Return what ``store`` wants behind the slots, once the scales ``[1]`` or ``[K]`` are."""
        wanted = self._kernel.prepared(key_scale=key_scale, value_scale=value_scale)
        return wanted["key_scale"], wanted["value_scale"], *self._rounded_to
