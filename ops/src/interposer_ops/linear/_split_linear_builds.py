"""Builds of projections of few rows, of the sizes of an 8B model and of parts of larger ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer import Dims
from interposer_ops._triton.build import Build, meta

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_E4M3, _FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
# What the records refuse.
_WITHOUT = frozenset(
    {
        *("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
        *("gfx908", "gfx1100", "gfx1201"),
    }
)


def _plain(
    num_tokens: int, in_features: int, out_features: int, dtype: torch.dtype, bias: bool
) -> Callable[[], tuple[Any, ...]]:
    return lambda: (
        meta(dtype, num_tokens, in_features),
        meta(dtype, out_features, in_features),
        meta(dtype, out_features) if bias else None,
    )


def _fp8(
    num_tokens: int, out_features: int, dtype: torch.dtype, scales_per_row: bool
) -> Callable[[], tuple[Any, ...]]:
    return lambda: (
        meta(dtype, num_tokens, 4096),
        meta(dtype, out_features, 4096),
        meta(_FP32, num_tokens, 1) if scales_per_row else meta(_FP32, 1),
        meta(_FP32, out_features) if scales_per_row else meta(_FP32, 1),
        None,
        _BF16,
    )


def _linear(
    label: str,
    num_tokens: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype = _BF16,
    bias: bool = False,
) -> Build:
    dims: Dims = {"in_features": in_features, "out_features": out_features}
    return Build(
        "linear_split",
        label,
        _plain(num_tokens, in_features, out_features, dtype, bias),
        str(dtype).removeprefix("torch."),
        dims,
        matrix=True,
        without=_WITHOUT,
    )


def _scaled(
    label: str,
    num_tokens: int,
    out_features: int,
    dtype: torch.dtype = _E4M3,
    scales_per_row: bool = True,
    without: frozenset[str] = frozenset(),
) -> Build:
    name = str(dtype).removeprefix("torch.")
    return Build(
        "fp8_linear_split",
        label,
        _fp8(num_tokens, out_features, dtype, scales_per_row),
        dims={
            **{"in_features": 4096, "out_features": out_features},
            **{"x_dtype": name, "weight_dtype": name},
        },
        matrix=True,
        without=_WITHOUT | without,
    )


BUILDS = (
    _linear("1 token, 4096 to 4096", 1, 4096, 4096),
    _linear("16 tokens, 14336 to 4096, bias", 16, 14336, 4096, bias=True),
    _linear("16 tokens, 4096 to 128256, one part", 16, 4096, 128256),
    _linear("float16, 4 tokens, 2880 to 1000, padded", 4, 2880, 1000, _FP16),
    _scaled("1 token, 4096 to 4096", 1, 4096),
    _scaled("16 tokens, 4096 to 14336, scales per tensor", 16, 14336, scales_per_row=False),
    _scaled(
        "1 token, 4096 to 4096, float8_e4m3fnuz",
        *(1, 4096, _FNUZ),
        without=frozenset({"gfx90a", "gfx950"}),
    ),
)
