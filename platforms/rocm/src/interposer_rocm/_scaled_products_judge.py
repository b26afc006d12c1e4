"""Products of 8-bit floats that torch's operator takes on a GPU of AMD, without importing torch.

Source: ``ScaledBlas.cpp`` of torch 2.11 to 2.13: devices (gfx942, gfx950, gfx1200, gfx1201),
operands of fnuz on gfx942 alone, sizes in multiples of 16, results of scales per row in bfloat16,
and blocks of scales by no architecture but those of MX.
"""

from __future__ import annotations

from interposer import Request, Verdict
from interposer_ops.triton import judge_split as judge_few_rows

_MULTIPLE = 16
_FORMAT = "float8_e4m3fn"


def judge(request: Request) -> Verdict:
    """Accept what the operator takes; the record names the architectures."""
    dims = request.dims
    for name in ("x_dtype", "weight_dtype"):
        if dims[name] != _FORMAT:
            return Verdict.refuse(f"takes {_FORMAT}, {name} is {dims[name]}")
    for name in ("in_features", "out_features"):
        if int(dims[name]) % _MULTIPLE:
            return Verdict.refuse(f"{name} is {dims[name]}, must be a multiple of {_MULTIPLE}")
    single = dims["x_scales"] == dims["weight_scales"] == "tensor"
    if not single and request.dtype != "bfloat16":
        return Verdict.refuse(f"scales of rows need results of bfloat16, got {request.dtype}")
    return Verdict.accept()


def judge_split(request: Request) -> Verdict:
    """Accept products that the operator takes, where portable kernels split sums of few rows."""
    verdict = judge(request)
    return judge_few_rows(request) if verdict else verdict
