"""Constants of the compiled library's C interface, such as dtype numbers."""

from __future__ import annotations

import struct

import torch

from interposer.tooling import UINT4

FLOAT32 = torch.float32

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of inputs and results."""

SCALE_TYPES = {**TYPES, torch.uint8: 4}
"""Dtypes of weight scales; uint8 are exponents (e8m0)."""

CODE_TYPES = {torch.int8: 3, torch.float8_e4m3fn: 5}
"""Dtypes of quantized inputs."""

CACHE_TYPES = {
    **TYPES,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
    UINT4: 6,
}
"""Dtypes of cached keys and values."""

GELU = {"none": 1, "tanh": 2}
SILU = 0
QUICK_GELU = 3

SHARED_EXPONENTS = 2
"""Kind of scales in the microscaling (MX) formats: shared exponents."""


def float64_bits(number: float) -> int:
    """Return the bits of a float64 as an int64, since native calls take integers only."""
    (bits,) = struct.unpack("=q", struct.pack("=d", number))
    return int(bits)
