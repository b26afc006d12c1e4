"""Writing and reading of paged KV caches: unquantized, quantized to 8 or 4 bits, and latent.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.caches._cache_writer import CacheWriter
    from interposer_ops.caches._grouped_cache import (
        GROUP_SIZE,
        grouped_bytes,
        read_groups,
        round_groups,
    )
    from interposer_ops.caches._kv_cache import (
        cumulated,
        gather_cache,
        read_slots,
        reshape_and_cache,
        slot_rows,
        write_latent_cache,
    )
    from interposer_ops.caches._quantized_cache import (
        gather_cache_fp8,
        gather_cache_int8,
        reshape_and_cache_fp8,
        reshape_and_cache_int8,
    )

# fmt: off
__all__ = [
    "GROUP_SIZE", "CacheWriter", "cumulated", "gather_cache", "gather_cache_fp8",
    "gather_cache_int8", "grouped_bytes", "read_groups", "read_slots", "reshape_and_cache",
    "reshape_and_cache_fp8", "reshape_and_cache_int8", "round_groups", "slot_rows",
    "write_latent_cache",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.caches._cache_writer": "CacheWriter",
        "interposer_ops.caches._grouped_cache": "GROUP_SIZE grouped_bytes read_groups round_groups",
        "interposer_ops.caches._kv_cache": (
            "cumulated gather_cache read_slots reshape_and_cache slot_rows write_latent_cache"
        ),
        "interposer_ops.caches._quantized_cache": (
            "gather_cache_fp8 gather_cache_int8 reshape_and_cache_fp8 reshape_and_cache_int8"
        ),
    },
)


def __dir__() -> list[str]:
    return __all__
