"""Decoder attention over a paged cache written by ``CacheWriter``.

Sinks and 8-bit caches are optional.

Dimensions: T tokens, N heads, K kv heads, D head size, P pages, S page size.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from interposer import AttentionBackend, AttentionSpec, Capability, KVCacheLayout, Site, Verdict
from interposer_ops.caches._cache_writer import CacheWriter

# For reading and for writing, as ``prepare_scales`` returns them.
_NO_SCALES = ((None, None), ())
_8_BIT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


class DecoderBackend(AttentionBackend):
    """Base class of decoder attention over a paged cache; a subclass adds ``attend_to``, ``plan``.

    Attributes:
        write: see ``CacheWriter.store``.
    """

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._writer = CacheWriter(spec, site)
        self.write = self._writer.store

    @abstractmethod
    def attend_to(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Any,
        sinks: Tensor | None,
        scales: Any,
    ) -> Tensor:
        """Compute attention ``[T, N, D]`` over both caches ``[P, S, K, D]``, this step included.

        Args:
            scales: the first value that ``prepare_scales`` returns (key and value scale), or (None,
                None).
        """

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders with a cache in the model's dtype or 8 bits; sinks are supported."""
        if spec.cache_dtype in _8_BIT_DTYPES:
            spec = replace(spec, cache_dtype=spec.dtype)
        # judge_plain_decoder refuses sinks and shared caches, which this backend supports.
        return replace(spec, sinks=False, shared=False).judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Describe the cache of one layer, ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def prepare_scales(self, key_scale: Tensor, value_scale: Tensor) -> Any:
        """Return the scales for attention, and the scales prepared for the cache-writing kernel."""
        return (key_scale, value_scale), self._writer.prepared(key_scale, value_scale)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        plan: Any,
        *,
        scales: Any = None,
        sinks: Tensor | None = None,
        stored: bool = False,
    ) -> Tensor:
        """Store the step's keys and values, then compute attention ``[T, N, D]`` over the cache."""
        read_scales, write_scales = _NO_SCALES if scales is None else scales
        keys, values = cache.unbind(0)
        if not stored:
            self.write(key, value, keys, values, plan.slots, *write_scales)
        return self.attend_to(query, keys, values, plan, sinks, read_scales)
