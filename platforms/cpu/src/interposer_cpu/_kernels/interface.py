"""Numbers of the compiled library's C interface."""

from __future__ import annotations

import struct

import torch

from interposer.tooling import UINT4

FLOAT32 = torch.float32

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Inputs and results."""

SCALE_TYPES = {**TYPES, torch.uint8: 4}
"""Scales of weights; bytes are exponents."""

CODE_TYPES = {torch.int8: 3, torch.float8_e4m3fn: 5}
"""Codes that inputs are quantized to."""

CACHE_TYPES = {
    **TYPES,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
    UINT4: 6,
}
"""Keys and values of a cache."""

GELU = {"none": 1, "tanh": 2}
SILU = 0

SHARED_EXPONENTS = 2
"""Scales as the microscaling formats have them."""


def float64_bits(number: float) -> int:
    """Return the bits of a float64, as an int64."""
    (bits,) = struct.unpack("=q", struct.pack("=d", number))
    return int(bits)
