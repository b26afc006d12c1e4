"""Linear layers with quantized weights, by format.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.quantized_linear._block_scaled_linear import (
        mxfp4_linear,
        mxfp8_linear,
        nvfp4_linear,
    )
    from interposer_ops.quantized_linear._fp8_linear import fp8_block_linear, fp8_linear
    from interposer_ops.quantized_linear._int8_linear import int8_linear, w4a8_linear
    from interposer_ops.quantized_linear._quantized_product import CodedProduct, StaticProduct
    from interposer_ops.quantized_linear._scale_tiles import tile_scales
    from interposer_ops.quantized_linear._scaled_mm import fp8_linear_scaled_mm
    from interposer_ops.quantized_linear._weight_only_linear import w4a16_linear, w8a16_linear

# fmt: off
__all__ = [
    "CodedProduct", "StaticProduct", "fp8_block_linear", "fp8_linear", "fp8_linear_scaled_mm",
    "int8_linear", "mxfp4_linear", "mxfp8_linear", "nvfp4_linear", "tile_scales", "w4a8_linear",
    "w4a16_linear", "w8a16_linear",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.quantized_linear._block_scaled_linear": (
            "mxfp4_linear mxfp8_linear nvfp4_linear"
        ),
        "interposer_ops.quantized_linear._fp8_linear": "fp8_block_linear fp8_linear",
        "interposer_ops.quantized_linear._int8_linear": "int8_linear w4a8_linear",
        "interposer_ops.quantized_linear._quantized_product": "CodedProduct StaticProduct",
        "interposer_ops.quantized_linear._scale_tiles": "tile_scales",
        "interposer_ops.quantized_linear._scaled_mm": "fp8_linear_scaled_mm",
        "interposer_ops.quantized_linear._weight_only_linear": "w4a16_linear w8a16_linear",
    },
)


def __dir__() -> list[str]:
    return __all__
