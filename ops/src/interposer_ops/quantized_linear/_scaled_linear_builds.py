"""Builds of projections of 8-bit numbers, of the sizes of an 8B model. T tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from interposer import Dims
from interposer_ops._triton.build import Build, meta

_BF16, _FP32, _INT8, _INT32 = torch.bfloat16, torch.float32, torch.int8, torch.int32
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_FNUZ = torch.float8_e4m3fnuz
_HIDDEN, _MLP = 4096, 14336
# Tokens and outputs: a step of one sequence, of some, and a prefill.
_SIZES = ((1, _HIDDEN), (64, _MLP), (4096, _MLP))
# Triton multiplies integers from sm_80 on.
_OLD = frozenset({"sm_75"})
_NOT_FNUZ = _OLD | frozenset(
    {
        *("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
        *("gfx908", "gfx90a", "gfx950", "gfx1100", "gfx1201"),
    }
)


def _fp8(
    num_tokens: int, out_features: int, x: torch.dtype, weight: torch.dtype, bias: bool
) -> Any:
    return (
        meta(x, num_tokens, _HIDDEN),
        meta(weight, out_features, _HIDDEN),
        meta(_FP32, num_tokens, 1),
        meta(_FP32, out_features),
        meta(_BF16, out_features) if bias else None,
        _BF16,
    )


def _blocks(num_tokens: int, out_features: int) -> Any:
    return (
        meta(_E4M3, num_tokens, _HIDDEN),
        meta(_E4M3, out_features, _HIDDEN),
        meta(_FP32, num_tokens, _HIDDEN // 128),
        meta(_FP32, out_features // 128, _HIDDEN // 128),
        128,
        128,
        None,
        _BF16,
    )


def _int8(num_tokens: int, out_features: int, shifted: bool) -> Any:
    return (
        meta(_INT8, num_tokens, _HIDDEN),
        meta(_INT8, out_features, _HIDDEN),
        meta(_FP32, num_tokens, 1),
        meta(_FP32, out_features),
        meta(_INT32, num_tokens, 1) if shifted else None,
        meta(_BF16, out_features),
        _BF16,
    )


def _bound(make: Callable[..., Any], *sizes: Any) -> Callable[[], tuple[Any, ...]]:
    return lambda: make(*sizes)


def _builds() -> Iterator[Build]:
    for num_tokens, out_features in _SIZES:
        label = f"{num_tokens} tokens, {_HIDDEN} to {out_features}"
        features: Dims = {"in_features": _HIDDEN, "out_features": out_features}
        e4m3: Dims = {**features, "x_dtype": "float8_e4m3fn", "weight_dtype": "float8_e4m3fn"}
        yield Build(
            "fp8_linear_triton",
            label,
            _bound(_fp8, num_tokens, out_features, _E4M3, _E4M3, False),
            dims=e4m3,
            matrix=True,
        )
        yield Build(
            "fp8_block_linear_triton",
            label,
            _bound(_blocks, num_tokens, out_features),
            dims={**e4m3, "block_rows": 128, "block_columns": 128},
            matrix=True,
        )
        yield Build(
            "int8_linear_triton",
            label,
            _bound(_int8, num_tokens, out_features, False),
            dims=features,
            matrix=True,
            without=_OLD,
        )
    features = {"in_features": _HIDDEN, "out_features": _HIDDEN}
    for num_tokens in (64, 4096):
        yield Build(
            "fp8_linear_triton",
            f"{num_tokens} tokens, float8_e5m2 by float8_e4m3fn, bias",
            _bound(_fp8, num_tokens, _HIDDEN, _E5M2, _E4M3, True),
            dims={**features, "x_dtype": "float8_e5m2", "weight_dtype": "float8_e4m3fn"},
            matrix=True,
        )
        yield Build(
            "fp8_linear_triton",
            f"{num_tokens} tokens, float8_e4m3fnuz",
            _bound(_fp8, num_tokens, _HIDDEN, _FNUZ, _FNUZ, False),
            dims={**features, "x_dtype": "float8_e4m3fnuz", "weight_dtype": "float8_e4m3fnuz"},
            matrix=True,
            without=_NOT_FNUZ,
        )
        yield Build(
            "int8_linear_triton",
            f"{num_tokens} tokens, zero points",
            _bound(_int8, num_tokens, _HIDDEN, True),
            dims=features,
            matrix=True,
            without=_OLD,
        )


# Those of one kernel together, as the table has it.
BUILDS = tuple(sorted(_builds(), key=lambda build: build.kernel))
