"""Builds of low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP16, _FP32, _INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int64


def _shrink(rank: int, dtype: torch.dtype = _BF16) -> Callable[[], tuple[Any, ...]]:
    return lambda: (meta(dtype, 64, 4096), meta(dtype, 8, rank, 4096), meta(_INT64, 64), 0.5)


def _expand(rank: int, dtype: torch.dtype = _BF16) -> Callable[[], tuple[Any, ...]]:
    return lambda: (
        meta(_FP32, 64, rank),
        meta(dtype, 8, 4096, rank),
        meta(_INT64, 64),
        meta(dtype, 64, 6144),
        1024,
    )


_SHRINK, _EXPAND = "lora_shrink_triton", "lora_expand_triton"

BUILDS = (
    Build(_SHRINK, "8 adapters of rank 16, 4096 inputs", _shrink(16), matrix=True),
    Build(_SHRINK, "8 adapters of rank 64, 4096 inputs", _shrink(64), matrix=True),
    Build(_SHRINK, "float16, 8 adapters of rank 8", _shrink(8, _FP16), "float16", matrix=True),
    Build(_SHRINK, "float32, 8 adapters of rank 64", _shrink(64, _FP32), "float32"),
    Build(_EXPAND, "8 adapters of rank 16, 4096 outputs", _expand(16), matrix=True),
    Build(_EXPAND, "8 adapters of rank 64, 4096 outputs", _expand(64), matrix=True),
    Build(_EXPAND, "float16, 8 adapters of rank 64", _expand(64, _FP16), "float16", matrix=True),
    Build(_EXPAND, "float32, 8 adapters of rank 64", _expand(64, _FP32), "float32"),
)
