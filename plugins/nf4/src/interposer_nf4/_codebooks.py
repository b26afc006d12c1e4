"""The 16 values of each 4-bit format, as bitsandbytes 0.50 stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

QuantType = Literal["nf4", "fp4"]

_NF4 = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)
# A float with exponents from -2 to 0 and one mantissa bit, scaled to a maximum of 1. The value next
# to zero is smaller than any subnormal of that float.
_FP4 = tuple(twelfths / 12 for twelfths in (0, 1 / 16, 8, 12, 4, 6, 2, 3))

CODEBOOKS: Mapping[QuantType, tuple[float, ...]] = {
    "nf4": _NF4,
    "fp4": (*_FP4, 0.0, *(-number for number in _FP4[1:])),
}
"""Codebooks by ``bnb_4bit_quant_type``, for test cases and examples.

Checkpoints store a codebook of their own, which is the one that layers use.

Source: NF4: QLoRA, arXiv:2305.14314, appendix E. FP4: the table that bitsandbytes stores.
"""
