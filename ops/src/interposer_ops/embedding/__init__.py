"""Lookups of rows: embeddings, plain and quantized, and selection of tokens.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.embedding._embedding import (
        embedding,
        vocab_parallel_embedding,
        w4a16_embedding,
        w8a16_embedding,
    )
    from interposer_ops.embedding._token_selection import pad_rows, select_rows, unpad_rows

# fmt: off
__all__ = [
    "embedding", "pad_rows", "select_rows", "unpad_rows", "vocab_parallel_embedding",
    "w4a16_embedding", "w8a16_embedding",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.embedding._embedding": (
            "embedding vocab_parallel_embedding w4a16_embedding w8a16_embedding"
        ),
        "interposer_ops.embedding._token_selection": "pad_rows select_rows unpad_rows",
    },
)


def __dir__() -> list[str]:
    return __all__
