"""Builds of attention to latent vectors: the sizes of DeepSeek-V3, of all heads and of a rank's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_INT32, _INT64 = torch.int32, torch.int64
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_NO_E4M3 = frozenset({"sm_75", "sm_80"})
_LATENT, _ROTARY, _PAGE = 512, 64, 64
_SCALE = (128 + 64) ** -0.5


def _decode(
    dtype: torch.dtype, heads: int, cache_dtype: torch.dtype | None = None
) -> Callable[[], tuple[Any, ...]]:
    """Return what makes the arguments; a cache of a dtype of its own has a scale."""
    return lambda: (
        meta(dtype, 32, heads, _LATENT + _ROTARY),
        meta(cache_dtype or dtype, 4096, _PAGE, _LATENT + _ROTARY),
        meta(_INT64, 32, 128),
        meta(_INT64, 33),
        meta(_INT64, 32),
        1,
        _LATENT,
        _SCALE,
        None if cache_dtype is None else meta(_FP32, 1),
    )


def _sparse(
    dtype: torch.dtype, heads: int, cache_dtype: torch.dtype | None = None
) -> Callable[[], tuple[Any, ...]]:
    return lambda: (
        meta(dtype, 32, heads, _LATENT + _ROTARY),
        meta(cache_dtype or dtype, 4096, _PAGE, _LATENT + _ROTARY),
        meta(_INT64, 32, 128),
        meta(_INT64, 32),
        meta(_INT32, 32, 2048),
        _LATENT,
        _SCALE,
        None if cache_dtype is None else meta(_FP32, 1),
    )


def _scores(
    dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> Callable[[], tuple[Any, ...]]:
    return lambda: (
        meta(dtype, 32, 64, 128),
        meta(cache_dtype or dtype, 4096, _PAGE, 128),
        meta(_FP32, 32, 64),
        meta(_INT64, 32, 128),
        meta(_INT64, 33),
        meta(_INT64, 32),
        8192,
        None if cache_dtype is None else meta(_FP32, 4096, _PAGE),
    )


def _write() -> tuple[Any, ...]:
    cache = meta(_BF16, 4096, _PAGE, _LATENT + _ROTARY)
    return meta(_BF16, 64, _LATENT), meta(_BF16, 64, _ROTARY), cache, meta(_INT64, 64)


def _products(op: str, make: Callable[..., Callable[[], tuple[Any, ...]]]) -> tuple[Build, ...]:
    """Return the builds of an attention op."""
    kernel = f"{op}_triton"
    e4m3 = {"cache_dtype": "float8_e4m3fn"}
    e5m2 = {"cache_dtype": "float8_e5m2"}
    return (
        Build(kernel, "bfloat16, 128 heads", make(_BF16, 128), matrix=True),
        Build(kernel, "bfloat16, 16 heads", make(_BF16, 16), matrix=True),
        Build(kernel, "float16, 16 heads", make(_FP16, 16), "float16", matrix=True),
        Build(kernel, "float32, 16 heads", make(_FP32, 16), "float32"),
        Build(
            kernel,
            "float8_e4m3fn cache, 128 heads",
            make(_BF16, 128, _E4M3),
            dims=e4m3,
            matrix=True,
            without=_NO_E4M3,
        ),
        Build(
            kernel,
            "float8_e5m2 cache, 16 heads",
            make(_BF16, 16, _E5M2),
            dims=e5m2,
            matrix=True,
        ),
    )


BUILDS = (
    Build("write_latent_cache_triton", "512 + 64 wide", _write),
    *_products("latent_attention_decode", _decode),
    *_products("sparse_latent_attention", _sparse),
    Build("indexer_scores_triton", "bfloat16, 64 heads of 128", _scores(_BF16), matrix=True),
    Build("indexer_scores_triton", "float32, 64 heads of 128", _scores(_FP32), "float32"),
    Build(
        "indexer_scores_triton",
        "float8_e4m3fn keys, 64 heads of 128",
        _scores(_BF16, _E4M3),
        dims={"cache_dtype": "float8_e4m3fn"},
        matrix=True,
        without=_NO_E4M3,
    ),
)
