"""Quantizers of activations and weights to 8 and 4 bits.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.quantizers._fp8_quantizers import (
        quantize_fp8_blocks,
        quantize_fp8_per_token,
        quantize_fp8_static,
    )
    from interposer_ops.quantizers._int8_quantizers import (
        quantize_int8_per_token,
        quantize_int8_per_token_asymmetric,
        quantize_int8_static,
    )
    from interposer_ops.quantizers._mx_quantizers import (
        MX_BLOCK_SIZE,
        NVFP4_BLOCK_SIZE,
        dequantize_mxfp4,
        dequantize_nvfp4,
        quantize_mxfp4,
        quantize_mxfp8,
        quantize_nvfp4,
    )
    from interposer_ops.quantizers._small_floats import (
        E2M1_MAX,
        decode_e2m1,
        decode_e8m0,
        encode_e2m1,
        pack_nibbles,
        shared_exponents,
        unpack_nibbles,
    )
    from interposer_ops.quantizers._weight_quantizers import (
        quantize_weight_int4,
        quantize_weight_int4_asymmetric,
        quantize_weight_int8,
        row_chunks,
    )

# fmt: off
__all__ = [
    "E2M1_MAX", "MX_BLOCK_SIZE", "NVFP4_BLOCK_SIZE", "decode_e2m1", "decode_e8m0",
    "dequantize_mxfp4", "dequantize_nvfp4", "encode_e2m1", "pack_nibbles",
    "quantize_fp8_blocks", "quantize_fp8_per_token",
    "quantize_fp8_static", "quantize_int8_per_token", "quantize_int8_per_token_asymmetric",
    "quantize_int8_static", "quantize_mxfp4", "quantize_mxfp8", "quantize_nvfp4",
    "quantize_weight_int4", "quantize_weight_int4_asymmetric", "quantize_weight_int8",
    "row_chunks", "shared_exponents", "unpack_nibbles",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.quantizers._fp8_quantizers": (
            "quantize_fp8_blocks quantize_fp8_per_token quantize_fp8_static"
        ),
        "interposer_ops.quantizers._int8_quantizers": (
            "quantize_int8_per_token quantize_int8_per_token_asymmetric quantize_int8_static"
        ),
        "interposer_ops.quantizers._mx_quantizers": (
            "MX_BLOCK_SIZE NVFP4_BLOCK_SIZE dequantize_mxfp4 dequantize_nvfp4 quantize_mxfp4 "
            "quantize_mxfp8 quantize_nvfp4"
        ),
        "interposer_ops.quantizers._small_floats": (
            "E2M1_MAX decode_e2m1 decode_e8m0 encode_e2m1 pack_nibbles shared_exponents "
            "unpack_nibbles"
        ),
        "interposer_ops.quantizers._weight_quantizers": (
            "quantize_weight_int4 quantize_weight_int4_asymmetric quantize_weight_int8 row_chunks"
        ),
    },
)


def __dir__() -> list[str]:
    return __all__
