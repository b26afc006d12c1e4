"""Rotary position embeddings and tables of angles.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.rotary._rope_scaling import ROPE_TYPES, rotary_frequencies, rotary_table
    from interposer_ops.rotary._rotary import (
        rotary_embedding,
        rotary_embedding_interleaved,
    )

# fmt: off
__all__ = [
    "ROPE_TYPES", "rotary_embedding", "rotary_embedding_interleaved", "rotary_frequencies",
    "rotary_table",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.rotary._rope_scaling": "ROPE_TYPES rotary_frequencies rotary_table",
        "interposer_ops.rotary._rotary": ("rotary_embedding rotary_embedding_interleaved"),
    },
)


def __dir__() -> list[str]:
    return __all__
