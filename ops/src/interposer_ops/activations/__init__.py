"""Activations of single elements, and gated ones.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.activations._activations import (
        fatrelu_and_mul,
        gelu,
        gelu_and_mul,
        mul_and_silu,
        quick_gelu,
        relu2,
        relu2_and_mul,
        silu_and_mul,
        silu_and_mul_quantize_fp8,
        swiglu_clamped_and_mul,
        swiglu_oai_and_mul,
    )

# fmt: off
__all__ = [
    "fatrelu_and_mul", "gelu", "gelu_and_mul", "mul_and_silu", "quick_gelu", "relu2",
    "relu2_and_mul", "silu_and_mul", "silu_and_mul_quantize_fp8", "swiglu_clamped_and_mul",
    "swiglu_oai_and_mul",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.activations._activations": (
            "fatrelu_and_mul gelu gelu_and_mul mul_and_silu quick_gelu relu2 relu2_and_mul "
            "silu_and_mul silu_and_mul_quantize_fp8 swiglu_clamped_and_mul swiglu_oai_and_mul"
        )
    },
)


def __dir__() -> list[str]:
    return __all__
