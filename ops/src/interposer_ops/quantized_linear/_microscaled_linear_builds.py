"""Builds of projections whose small blocks share a scale, of the sizes of an 8B model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP16, _FP32, _BYTE = torch.bfloat16, torch.float16, torch.float32, torch.uint8
_E4M3 = torch.float8_e4m3fn
_HIDDEN, _MLP = 4096, 14336
# Tokens and outputs: a step of one sequence, of some, and a prefill.
_SIZES = ((1, _HIDDEN), (64, _MLP), (4096, _MLP))


def _mxfp4(num_tokens: int, out_features: int, dtype: torch.dtype) -> Any:
    return (
        meta(dtype, num_tokens, _HIDDEN),
        meta(_BYTE, out_features, _HIDDEN // 2),
        meta(_BYTE, out_features, _HIDDEN // 32),
        meta(dtype, out_features),
    )


def _mxfp8(num_tokens: int, out_features: int) -> Any:
    return (
        meta(_E4M3, num_tokens, _HIDDEN),
        meta(_BYTE, num_tokens, _HIDDEN // 32),
        meta(_E4M3, out_features, _HIDDEN),
        meta(_BYTE, out_features, _HIDDEN // 32),
        None,
        _BF16,
    )


def _nvfp4(num_tokens: int, out_features: int) -> Any:
    return (
        meta(_BYTE, num_tokens, _HIDDEN // 2),
        meta(_E4M3, num_tokens, _HIDDEN // 16),
        meta(_BYTE, out_features, _HIDDEN // 2),
        meta(_E4M3, out_features, _HIDDEN // 16),
        meta(_FP32, 1),
        None,
        _BF16,
    )


def _bound(make: Callable[..., Any], *sizes: Any) -> Callable[[], tuple[Any, ...]]:
    return lambda: make(*sizes)


def _builds() -> Iterator[Build]:
    for num_tokens, out_features in _SIZES:
        label = f"{num_tokens} tokens, {_HIDDEN} to {out_features}"
        dims = {"in_features": _HIDDEN, "out_features": out_features}
        mxfp4 = _bound(_mxfp4, num_tokens, out_features, _BF16)
        mxfp8 = _bound(_mxfp8, num_tokens, out_features)
        nvfp4 = _bound(_nvfp4, num_tokens, out_features)
        yield Build("mxfp4_linear_triton", label, mxfp4, dims=dims, matrix=True)
        yield Build("mxfp8_linear_triton", label, mxfp8, dims=dims, matrix=True)
        yield Build("nvfp4_linear_triton", label, nvfp4, dims=dims, matrix=True)
    for num_tokens in (64, 4096):
        dims = {"in_features": _HIDDEN, "out_features": _HIDDEN}
        half = _bound(_mxfp4, num_tokens, _HIDDEN, _FP16)
        label = f"{num_tokens} tokens, float16"
        yield Build("mxfp4_linear_triton", label, half, "float16", dims, matrix=True)


# Those of one kernel together, as the table has it.
BUILDS = tuple(sorted(_builds(), key=lambda build: build.kernel))
