"""Builds of copies out of a paged cache and within it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP32, _INT64 = torch.bfloat16, torch.float32, torch.int64
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _cache(dtype: torch.dtype) -> torch.Tensor:
    return meta(dtype, 100, 16, 8, 128)


def _sequences() -> tuple[torch.Tensor, ...]:
    return meta(_INT64, 32, 64), meta(_INT64, 32), meta(_INT64, 32)


def _gathered(dtype: torch.dtype) -> Callable[[], tuple[Any, ...]]:
    return lambda: (_cache(dtype), *_sequences(), 2048)


def _gathered_fp8(dtype: torch.dtype, scales: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (_cache(dtype), *_sequences(), meta(_FP32, scales), 2048, _BF16)


def _copied(dtype: torch.dtype) -> Callable[[], tuple[Any, ...]]:
    return lambda: (_cache(dtype), _cache(dtype), meta(_INT64, 32), meta(_INT64, 32))


BUILDS = (
    Build("gather_cache_triton", "8 heads of 128", _gathered(_BF16)),
    Build("gather_cache_triton", "float8_e4m3fn", _gathered(_E4M3), "float8_e4m3fn"),
    Build(
        "gather_cache_fp8_triton",
        "float8_e4m3fn, a scale of each head",
        _gathered_fp8(_E4M3, 8),
        dims={"cache_dtype": "float8_e4m3fn"},
        without=frozenset({"sm_75", "sm_80"}),
    ),
    Build(
        "gather_cache_fp8_triton",
        "float8_e5m2, one scale",
        _gathered_fp8(_E5M2, 1),
        dims={"cache_dtype": "float8_e5m2"},
    ),
    Build("copy_pages_triton", "8 heads of 128", _copied(_BF16)),
    Build("copy_pages_triton", "float8_e4m3fn", _copied(_E4M3), "float8_e4m3fn"),
)
