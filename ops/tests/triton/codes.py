"""Multiply every code of narrow formats by one, interpreted; print which products are right.

In a process of its own with TRITON_INTERPRET=1: triton decides when it is imported.
"""

from __future__ import annotations

import json
import sys

import torch

from interposer_ops.quantized_linear._microscaled_linear_triton import (
    mxfp4_linear_triton,
    mxfp8_linear_triton,
    nvfp4_linear_triton,
)
from interposer_ops.quantized_linear._scaled_linear_triton import (
    fp8_block_linear_triton,
    fp8_linear_triton,
)
from interposer_ops.quantizers import decode_e2m1, decode_e8m0
from interposer_testing.exact_interpreter import make_exact

CODES = torch.arange(256, dtype=torch.uint8)
E2M1 = torch.arange(16, dtype=torch.uint8)
ONE = torch.ones(1)
FP32 = torch.float32


def same(product: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(product.flatten().float().nan_to_num(7.5e5), expected.nan_to_num(7.5e5))


def alone(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Return rows of zeros that begin with one of ``codes``."""
    rows = torch.zeros(len(codes), width, dtype=torch.uint8)
    rows[:, 0] = codes
    return rows


def fp8(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    x = CODES.view(x_dtype)
    weight = torch.ones(1, 1).to(weight_dtype)
    return same(fp8_linear_triton(x[:, None], weight, ONE, ONE, None, FP32), x.float())


def mxfp4(dtype: torch.dtype) -> bool:
    """Compare the weights with the numbers that they stand for."""
    x = torch.zeros(1, 32, dtype=dtype)
    x[0, 0] = 1
    scales = torch.full((16, 1), 127, dtype=torch.uint8)
    product = mxfp4_linear_triton(x, alone(E2M1, 16), scales, None)
    return same(product, decode_e2m1(E2M1, FP32))


def main() -> None:
    make_exact()
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    pairs = [(e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)]
    results = {
        f"{str(x).removeprefix('torch.')} by {str(w).removeprefix('torch.')}": fp8(x, w)
        for x, w in pairs
    }
    e4m3_rows = alone(CODES, 32).view(e4m3)
    weight = torch.ones(1, 32).to(e4m3)
    numbers = CODES.view(e4m3).float()
    scales = torch.ones(256, 1)
    results["blocks"] = same(
        fp8_block_linear_triton(e4m3_rows, weight, scales, torch.ones(1, 1), 32, 32, None, FP32),
        numbers,
    )
    one = torch.full((1, 1), 127, dtype=torch.uint8)
    results["mxfp8"] = same(
        mxfp8_linear_triton(e4m3_rows, one.expand(256, 1), weight, one, None, FP32), numbers
    )
    # Each exponent with the element 1.
    ones = alone(torch.full((256,), 0x38, dtype=torch.uint8), 32).view(e4m3)
    results["exponents"] = same(
        mxfp8_linear_triton(ones, CODES[:, None], weight, one, None, FP32), decode_e8m0(CODES, FP32)
    )
    for dtype in (FP32, torch.bfloat16, torch.float16):
        results[f"mxfp4 {str(dtype).removeprefix('torch.')}"] = mxfp4(dtype)
    units = torch.ones(1, 1).to(e4m3)
    whole = torch.full((1, 8), 0x22, dtype=torch.uint8)  # 1 and 1
    results["nvfp4"] = same(
        nvfp4_linear_triton(alone(E2M1, 8), units.expand(16, 1), whole, units, ONE, None, FP32),
        decode_e2m1(E2M1, FP32),
    )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
