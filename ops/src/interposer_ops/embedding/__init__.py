"""Embedding lookups in float and quantized tables.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.embedding._embedding import (
        embedding,
        w4a16_embedding,
        w8a16_embedding,
    )

# fmt: off
__all__ = [
    "embedding", "w4a16_embedding", "w8a16_embedding",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.embedding._embedding": ("embedding w4a16_embedding w8a16_embedding"),
    },
)


def __dir__() -> list[str]:
    return __all__
