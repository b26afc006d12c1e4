"""Verdicts of vLLM's ops on requests; torch is imported only where vLLM is installed."""

from __future__ import annotations

from interposer import Request, Verdict
from interposer_vllm._ops.library import judge_op

_GATED_GELU = {"none": "_C::gelu_and_mul", "tanh": "_C::gelu_tanh_and_mul"}


def judge_rms_norm(request: Request) -> Verdict:
    """Accept where the op is there."""
    return judge_op(request, "_C::rms_norm")


def judge_fused_add_rms_norm(request: Request) -> Verdict:
    """Accept a residual in the dtype of ``x``, which the op writes the sum into."""
    residual = str(request.dims["residual_dtype"])
    if residual != request.dtype:
        return Verdict.refuse(f"takes a residual of {request.dtype}, as x is, got {residual}")
    return judge_op(request, "_C::fused_add_rms_norm")


def judge_silu_and_mul(request: Request) -> Verdict:
    """Accept where the op is there."""
    return judge_op(request, "_C::silu_and_mul")


def judge_gelu_and_mul(request: Request) -> Verdict:
    """Accept where the op of the asked approximation is there."""
    return judge_op(request, _GATED_GELU[str(request.dims["approximate"])])


def judge_gelu(request: Request) -> Verdict:
    """Accept where the op is there."""
    return judge_op(request, "_C::gelu_tanh")


def judge_quick_gelu(request: Request) -> Verdict:
    """Accept where the op is there."""
    return judge_op(request, "_C::gelu_quick")


def judge_rotary(request: Request) -> Verdict:
    """Accept where the op is there."""
    return judge_op(request, "_C::rotary_embedding")


def judge_static_int8(request: Request) -> Verdict:
    """Accept where the op is there."""
    return judge_op(request, "_C::static_scaled_int8_quant")


def judge_dynamic_int8(request: Request) -> Verdict:
    """Accept where the op is there."""
    return judge_op(request, "_C::dynamic_scaled_int8_quant")


def judge_packed_linear(request: Request) -> Verdict:
    """Accept where both the product and the packing of its weight are there."""
    return judge_op(request, "_C::weight_packed_linear", "_C::convert_weight_packed")
