"""Activations: elementwise and gated.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.activations._activations import (
        gelu,
        gelu_and_mul,
        quick_gelu,
        relu2,
        silu_and_mul,
        silu_and_mul_quantize_fp8,
        swiglu_oai_and_mul,
    )

# fmt: off
__all__ = [
    "gelu", "gelu_and_mul", "quick_gelu", "relu2", "silu_and_mul", "silu_and_mul_quantize_fp8",
    "swiglu_oai_and_mul",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.activations._activations": (
            "gelu gelu_and_mul quick_gelu relu2 silu_and_mul silu_and_mul_quantize_fp8 "
            "swiglu_oai_and_mul"
        )
    },
)


def __dir__() -> list[str]:
    return __all__
