"""Projections by oneDNN, most of them with weights in its blocked layout.

I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from interposer import Request, Verdict

# Up to this many products in float32, oneDNN's call costs more than it saves.
_FEW_PRODUCTS = 1 << 18


def linear_packed(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the op ``linear`` for a ``weight`` of ``pack``."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def linear_packed_by_rows(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the op ``linear`` for a ``weight`` of ``pack_beside``: plain for few rows."""
    plain, packed = weight
    if x.numel() * plain.shape[0] <= _FEW_PRODUCTS:
        return functional.linear(x, plain, bias)
    return linear_packed(x, packed, bias)


def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the op ``batched_linear`` by torch's product, which does not widen bfloat16."""
    return torch.bmm(x, weight)


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Return the constants with ``weight`` ``[O, I]`` reordered into blocks."""
    return {"weight": torch.ops.mkldnn._reorder_linear_weight.default(weight), "bias": bias}


def pack_beside(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Return the constants with both the plain and the reordered ``weight``."""
    return {"weight": (weight, pack(weight, bias)["weight"]), "bias": bias}


def judge_packed(request: Request) -> Verdict:
    """Accept all of bfloat16, and float32 weights for which packing pays at one row."""
    if request.dtype == "float32" and _elements(request) <= _FEW_PRODUCTS:
        return Verdict.refuse(f"{_elements(request)} weights are too few to gain at one row")
    return _judge_build()


def judge_packed_by_rows(request: Request) -> Verdict:
    """Accept the small float32 weights, which may be held twice."""
    if _elements(request) > _FEW_PRODUCTS:
        return Verdict.refuse(f"{_elements(request)} weights are too many to hold twice")
    return _judge_build()


def _elements(request: Request) -> int:
    return int(request.dims["in_features"]) * int(request.dims["out_features"])


def _judge_build() -> Verdict:
    if not torch.backends.mkldnn.is_available():
        return Verdict.refuse("this build of torch lacks oneDNN")
    return Verdict.accept()
