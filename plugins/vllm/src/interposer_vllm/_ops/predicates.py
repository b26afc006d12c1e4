"""Predicates of the kernels: each accepts a request if vLLM's op can be called here."""

from __future__ import annotations

from interposer import Request, Verdict
from interposer_vllm._ops.library import check_op

_GATED_GELU = {"none": "_C::gelu_and_mul", "tanh": "_C::gelu_tanh_and_mul"}


def check_rms_norm(request: Request) -> Verdict:
    """Accept the request if vLLM's op ``_C::rms_norm`` can be called."""
    return check_op(request, "_C::rms_norm")


def check_fused_add_rms_norm(request: Request) -> Verdict:
    """Accept a residual in the dtype of ``x``: the op writes the sum into the residual."""
    residual = str(request.dims["residual_dtype"])
    if residual != request.dtype:
        return Verdict.refuse(f"takes a residual of {request.dtype}, as x is, got {residual}")
    return check_op(request, "_C::fused_add_rms_norm")


def check_silu_and_mul(request: Request) -> Verdict:
    """Accept the request if vLLM's op ``_C::silu_and_mul`` can be called."""
    return check_op(request, "_C::silu_and_mul")


def check_gelu_and_mul(request: Request) -> Verdict:
    """Accept the request if vLLM's op for the requested GELU approximation can be called."""
    return check_op(request, _GATED_GELU[str(request.dims["approximate"])])


def check_gelu(request: Request) -> Verdict:
    """Accept the request if vLLM's op ``_C::gelu_tanh`` can be called."""
    return check_op(request, "_C::gelu_tanh")


def check_quick_gelu(request: Request) -> Verdict:
    """Accept the request if vLLM's op ``_C::gelu_quick`` can be called."""
    return check_op(request, "_C::gelu_quick")


def check_rotary(request: Request) -> Verdict:
    """Accept the request if vLLM's op ``_C::rotary_embedding`` can be called."""
    return check_op(request, "_C::rotary_embedding")


def check_static_int8(request: Request) -> Verdict:
    """Accept the request if vLLM's op ``_C::static_scaled_int8_quant`` can be called."""
    return check_op(request, "_C::static_scaled_int8_quant")


def check_dynamic_int8(request: Request) -> Verdict:
    """Accept the request if vLLM's op ``_C::dynamic_scaled_int8_quant`` can be called."""
    return check_op(request, "_C::dynamic_scaled_int8_quant")


def check_packed_linear(request: Request) -> Verdict:
    """Accept the request if vLLM's matmul and weight-packing ops can both be called."""
    return check_op(request, "_C::weight_packed_linear", "_C::convert_weight_packed")
