"""Builds of projections of int8 by weights of four bits, of the sizes of an 8B model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer import Dims
from interposer_ops._triton.build import Build, meta

_BF16, _FP32, _INT32 = torch.bfloat16, torch.float32, torch.int32
_UINT8, _INT8 = torch.uint8, torch.int8


def _w4a8(
    tokens: int,
    out_features: int,
    *,
    group_size: int = 128,
    shifted: bool = False,
    asymmetric: bool = False,
    bias: bool = False,
) -> Callable[[], tuple[Any, ...]]:
    grouped = (out_features, 4096 // group_size)
    return lambda: (
        meta(_INT8, tokens, 4096),
        meta(_UINT8, out_features, 2048),
        meta(_FP32, tokens, 1),
        meta(_FP32, *grouped),
        meta(_INT32, tokens, 1) if shifted else None,
        meta(_UINT8, *grouped) if asymmetric else None,
        meta(_BF16, out_features) if bias else None,
        _BF16,
    )


def _build(label: str, tokens: int, out_features: int, **options: Any) -> Build:
    dims: Dims = {"group_size": options.get("group_size", 128)}
    make = _w4a8(tokens, out_features, **options)
    # It multiplies integers, which triton does from sm_80 on.
    without = frozenset({"sm_75"})
    return Build("w4a8_linear_triton", label, make, dims=dims, matrix=True, without=without)


BUILDS = (
    _build("1 token, 4096 to 4096, groups of 128", 1, 4096),
    _build("64 tokens, 4096 to 14336, groups of 128", 64, 14336),
    _build("4096 tokens, 4096 to 14336, groups of 128", 4096, 14336),
    _build("4096 tokens, 4096 to 4096, groups of 32", 4096, 4096, group_size=32),
    _build(
        "4096 tokens, 4096 to 4096, one scale per output, bias",
        4096,
        4096,
        group_size=4096,
        bias=True,
    ),
    _build("64 tokens, zero points of both operands", 64, 4096, shifted=True, asymmetric=True),
)
