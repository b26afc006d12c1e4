"""Linear layers of 8-bit floats by ``torch._scaled_mm``.

T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Request, Requires, Verdict
from interposer_ops._declare import standard_kernel

LEAST_ARCHITECTURE = 89
"""The lowest compute capability (8.9) with matrix instructions for 8-bit floats."""

_MULTIPLE = 16
_PAIRS = {("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn")}


@standard_kernel(
    "fp8_linear",
    "scaled_mm",
    requires=Requires(dtypes=("float32", "bfloat16", "float16")),
    predicate=f"{__name__}:judge",
    score=11.0,
    # Not traceable: ``_aligned`` reads addresses. A compiler would gain nothing from one GEMM.
    properties=frozenset({"deterministic", "graph_safe", "opaque"}),
    proven_on=frozenset({"sm_90"}),
)
def fp8_linear_scaled_mm(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute ``fp8_linear`` by cuBLASLt.

    The operator takes one scale per operand, or one scale per row of both operands. Operands must
    be contiguous and aligned to 16 bytes; others are copied.
    """
    rows = _aligned(x.reshape(-1, x.shape[-1]))
    columns = _aligned(weight).t()
    # The operator takes one scale per operand, or one per row of both: expand a single scale.
    if x_scale.numel() > 1 or weight_scale.numel() > 1:
        x_scale = x_scale.reshape(-1, 1).expand(rows.shape[0], 1)
        weight_scale = weight_scale.reshape(1, -1).expand(1, weight.shape[0])
    out = torch._scaled_mm(
        rows,
        columns,
        scale_a=_aligned(x_scale),
        scale_b=_aligned(weight_scale),
        bias=None if bias is None else _aligned(bias),
        out_dtype=out_dtype,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def _aligned(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy that is contiguous and aligned to 16 bytes for cuBLASLt."""
    if tensor.is_contiguous() and tensor.data_ptr() % _MULTIPLE == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def judge(request: Request) -> Verdict:
    """Accept requests that ``torch._scaled_mm`` can compute, on sm_89 and newer.

    Source: the checks of ``_scaled_mm`` of torch 2.13 for CUDA devices: sizes must be multiples of
    16, and with scales per row the result must be bfloat16.
    """
    dims, architecture = request.dims, request.capability.architecture
    number = architecture.removeprefix("sm_").rstrip("af")
    if not (architecture.startswith("sm_") and number.isdigit()):
        return Verdict.refuse(f"is for sm_{LEAST_ARCHITECTURE} and newer, found {architecture}")
    if int(number) < LEAST_ARCHITECTURE:
        return Verdict.refuse(f"needs sm_{LEAST_ARCHITECTURE} or newer, found {architecture}")
    pair = str(dims["x_dtype"]), str(dims["weight_dtype"])
    if pair not in _PAIRS:
        return Verdict.refuse(f"does not multiply {pair[0]} by {pair[1]}")
    for name in ("in_features", "out_features"):
        if int(dims[name]) % _MULTIPLE:
            return Verdict.refuse(f"{name} is {dims[name]}, must be a multiple of {_MULTIPLE}")
    single = dims["x_scales"] == dims["weight_scales"] == "tensor"
    if not single and request.dtype != "bfloat16":
        return Verdict.refuse(f"scales of rows need results of bfloat16, got {request.dtype}")
    return Verdict.accept()
