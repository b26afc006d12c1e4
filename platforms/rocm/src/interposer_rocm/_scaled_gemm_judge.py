"""Verdicts on FP8 GEMM by torch's ``scaled_mm`` on AMD GPUs, without importing torch.

Source: ``ScaledBlas.cpp`` of torch 2.11 to 2.13: devices (gfx942, gfx950, gfx1200, gfx1201), fnuz
operands on gfx942 only, sizes in multiples of 16, bfloat16 output for scales per row, and block
scales for MX formats only.
"""

from __future__ import annotations

from interposer import Request, Verdict
from interposer_ops.triton import judge_split as judge_split_k

_MULTIPLE = 16
_FORMAT = "float8_e4m3fn"


def judge(request: Request) -> Verdict:
    """Accept the formats, sizes and scales of ``scaled_mm``; the record lists architectures."""
    dims = request.dims
    for name in ("x_dtype", "weight_dtype"):
        if dims[name] != _FORMAT:
            return Verdict.refuse(f"takes {_FORMAT}, {name} is {dims[name]}")
    for name in ("in_features", "out_features"):
        if int(dims[name]) % _MULTIPLE:
            return Verdict.refuse(f"{name} is {dims[name]}, must be a multiple of {_MULTIPLE}")
    has_tensor_scales = dims["x_scales"] == dims["weight_scales"] == "tensor"
    if not has_tensor_scales and request.dtype != "bfloat16":
        return Verdict.refuse(f"scales of rows need results of bfloat16, got {request.dtype}")
    return Verdict.accept()


def judge_split(request: Request) -> Verdict:
    """Accept requests that both ``scaled_mm`` and the split-K Triton kernel take."""
    verdict = judge(request)
    return judge_split_k(request) if verdict else verdict
