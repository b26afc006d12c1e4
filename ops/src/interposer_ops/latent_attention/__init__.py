"""Multi-head latent attention (MLA) over a cache of latent vectors.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.latent_attention._latent_attention import (
        latent_attention_decode,
        sparse_latent_attention,
    )

# fmt: off
__all__ = [
    "latent_attention_decode", "sparse_latent_attention",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.latent_attention._latent_attention": (
            "latent_attention_decode sparse_latent_attention"
        )
    },
)


def __dir__() -> list[str]:
    return __all__
