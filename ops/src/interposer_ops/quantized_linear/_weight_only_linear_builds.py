"""Builds of projections with integer weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_UINT8, _INT8 = torch.uint8, torch.int8


def _w4(
    tokens: int,
    out_features: int,
    dtype: torch.dtype = _BF16,
    *,
    group_size: int = 128,
    symmetric: bool = False,
) -> Callable[[], tuple[Any, ...]]:
    grouped = (out_features, 4096 // group_size)
    return lambda: (
        meta(dtype, tokens, 4096),
        meta(_UINT8, out_features, 2048),
        meta(dtype, *grouped),
        None,
        None if symmetric else meta(_UINT8, *grouped),
    )


def _w8(
    tokens: int, out_features: int, dtype: torch.dtype = _BF16, *, group_size: int = 4096
) -> Callable[[], tuple[Any, ...]]:
    grouped = (out_features, 4096 // group_size)
    return lambda: (
        meta(dtype, tokens, 4096),
        meta(_INT8, out_features, 4096),
        meta(_FP32, *grouped),
        meta(dtype, out_features),
        meta(_INT8, *grouped) if group_size < 4096 else None,
    )


_W4, _W8 = "w4a16_linear_triton", "w8a16_linear_triton"

BUILDS = (
    Build(_W4, "1 token, 4096 to 4096, groups of 128", _w4(1, 4096), matrix=True),
    Build(_W4, "64 tokens, 4096 to 14336, groups of 128", _w4(64, 14336), matrix=True),
    Build(_W4, "4096 tokens, 4096 to 14336, groups of 128", _w4(4096, 14336), matrix=True),
    Build(
        _W4,
        "float16, 4096 tokens, 4096 to 4096, groups of 32, symmetric",
        _w4(4096, 4096, _FP16, group_size=32, symmetric=True),
        "float16",
        matrix=True,
    ),
    Build(_W4, "float32, 4096 tokens, groups of 128", _w4(4096, 4096, _FP32), "float32"),
    Build(_W8, "1 token, 4096 to 14336, one scale per output", _w8(1, 14336), matrix=True),
    Build(_W8, "64 tokens, 4096 to 4096, one scale per output", _w8(64, 4096), matrix=True),
    Build(_W8, "4096 tokens, 4096 to 14336, one scale per output", _w8(4096, 14336), matrix=True),
    Build(
        _W8,
        "float16, 4096 tokens, 4096 to 4096, groups of 128",
        _w8(4096, 4096, _FP16, group_size=128),
        "float16",
        matrix=True,
    ),
    Build(_W8, "float32, 64 tokens, one scale per output", _w8(64, 4096, _FP32), "float32"),
)
