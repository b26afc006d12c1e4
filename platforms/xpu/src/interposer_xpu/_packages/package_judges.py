"""Verdicts on requests to kernels of vllm-xpu-kernels, without importing torch."""

from __future__ import annotations

from interposer import Request, Verdict
from interposer_xpu._packages.kernel_package import judge_ops

_FP8 = ("float8_e4m3fn", "float8_e5m2")


def judge_int4(request: Request) -> Verdict:
    """Accept scales with the dtype of the activations, in which the int4 GEMM computes."""
    scales = str(request.dims["scale_dtype"])
    if scales != request.dtype:
        return Verdict.refuse(f"takes scales of {request.dtype}, as x is, got {scales}")
    return judge_ops("int4")


def judge_fp8(request: Request) -> Verdict:
    """Accept two operands of the same 8-bit float format."""
    pair = str(request.dims["x_dtype"]), str(request.dims["weight_dtype"])
    if pair[0] not in _FP8 or pair[0] != pair[1]:
        return Verdict.refuse(
            f"multiplies {' or '.join(_FP8)} by the same, got {' by '.join(pair)}"
        )
    return judge_ops("fp8")


def judge_fp8_weights(request: Request) -> Verdict:
    """Accept 8-bit float operands whose activations have one scale for the whole tensor."""
    for name in ("x_dtype", "weight_dtype"):
        if str(request.dims[name]) not in _FP8:
            return Verdict.refuse(f"takes {' or '.join(_FP8)}, {name} is {request.dims[name]}")
    if request.dims["x_scales"] != "tensor":
        return Verdict.refuse(f"takes one scale of x, got one per {request.dims['x_scales']}")
    return judge_ops("fp8_weights")


def judge_experts(_request: Request) -> Verdict:
    """Accept if the package has the three ops for MoE experts."""
    return judge_ops("experts")


def judge_routing(_request: Request) -> Verdict:
    """Accept if the package has the routing op ``topk_softmax``."""
    return judge_ops("routing")
