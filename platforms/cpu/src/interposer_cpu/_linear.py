"""Linear layers computed by oneDNN, most of them with weights in oneDNN's blocked layout.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from interposer import Request, Verdict

# Up to this many multiplications in float32, the overhead of a oneDNN call exceeds its gain.
_SMALL_MATMUL = 1 << 18


def linear_packed(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute the op ``linear`` with a ``weight`` packed by ``pack``."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def linear_packed_by_rows(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``linear`` with both weights of ``pack_both``: unpacked for few rows, else packed."""
    plain, packed = weight
    if x.numel() * plain.shape[0] <= _SMALL_MATMUL:
        return functional.linear(x, plain, bias)
    return linear_packed(x, packed, bias)


def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the op ``batched_linear`` by torch.bmm."""
    return torch.bmm(x, weight)


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Reorder the ``weight`` ``[O, I]`` into oneDNN's blocked layout; the bias is unchanged."""
    return {"weight": torch.ops.mkldnn._reorder_linear_weight.default(weight), "bias": bias}


def pack_both(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Return the ``weight`` twice: unpacked and in oneDNN's blocked layout."""
    return {"weight": (weight, pack(weight, bias)["weight"]), "bias": bias}


def judge_packed(request: Request) -> Verdict:
    """Accept bfloat16 weights, and float32 weights large enough that packing saves time."""
    if request.dtype == "float32" and _num_weights(request) <= _SMALL_MATMUL:
        return Verdict.refuse(f"{_num_weights(request)} weights are too few to gain at one row")
    return _judge_build()


def judge_packed_by_rows(request: Request) -> Verdict:
    """Accept only small float32 weights, since two copies are kept."""
    if _num_weights(request) > _SMALL_MATMUL:
        return Verdict.refuse(f"{_num_weights(request)} weights are too many to hold twice")
    return _judge_build()


def _num_weights(request: Request) -> int:
    return int(request.dims["in_features"]) * int(request.dims["out_features"])


def _judge_build() -> Verdict:
    if not torch.backends.mkldnn.is_available():
        return Verdict.refuse("this build of torch lacks oneDNN")
    return Verdict.accept()
