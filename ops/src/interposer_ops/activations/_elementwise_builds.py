"""Builds of kernels without matrix products: norms, activations, rotary embedding, cache writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP16, _FP32, _INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _norm(dtype: torch.dtype, width: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (meta(dtype, 64, width), meta(dtype, width), 1e-6)


def _added_norm(width: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (
        meta(_BF16, 64, width),
        meta(_FP32, 64, width),
        meta(_BF16, width),
        1e-6,
    )


def _activation(*options: object) -> Callable[[], tuple[Any, ...]]:
    return lambda: (meta(_BF16, 64, 2 * 11008), *options)


def _rotary() -> tuple[Any, ...]:
    heads, kv_heads = meta(_BF16, 64, 32, 128), meta(_BF16, 64, 8, 128)
    return heads, kv_heads, meta(_FP32, 64, 64), meta(_FP32, 64, 64)


def _multimodal() -> tuple[Any, ...]:
    query, key, _, _ = _rotary()
    angles = meta(_FP32, 3, 64, 64)
    return query, key, angles, angles, [24, 20, 20], True


def _stored(cache_dtype: torch.dtype) -> tuple[Any, ...]:
    tokens, cache = meta(_BF16, 64, 8, 128), meta(cache_dtype, 100, 16, 8, 128)
    return tokens, tokens, cache, cache, meta(_INT64, 64)


def _stored_fp8(dtype: torch.dtype) -> Callable[[], tuple[Any, ...]]:
    return lambda: (*_stored(dtype), meta(_FP32, 8), meta(_FP32, 8), dtype)


BUILDS = (
    Build("rms_norm_triton", "bfloat16, 4096 wide", _norm(_BF16, 4096)),
    Build("rms_norm_triton", "float32, 128 wide", _norm(_FP32, 128), "float32"),
    Build("rms_norm_triton", "float16, 20000 wide", _norm(_FP16, 20000), "float16"),
    Build("fused_add_rms_norm_triton", "4096 wide", _added_norm(4096)),
    Build("fused_add_rms_norm_triton", "18432 wide", _added_norm(18432)),
    Build("gemma_rms_norm_triton", "3584 wide", _norm(_BF16, 3584)),
    Build("fused_add_gemma_rms_norm_triton", "3584 wide", _added_norm(3584)),
    Build(
        "layer_norm_triton",
        "4096 wide",
        lambda: (meta(_BF16, 64, 4096), meta(_BF16, 4096), meta(_BF16, 4096), 1e-5),
    ),
    Build("gelu_triton", "erf", _activation("none")),
    Build("quick_gelu_triton", "plain", _activation()),
    Build("relu2_triton", "plain", _activation()),
    Build("silu_and_mul_triton", "plain", _activation()),
    Build("gelu_and_mul_triton", "tanh", _activation("tanh")),
    Build("mul_and_silu_triton", "plain", _activation()),
    Build("relu2_and_mul_triton", "plain", _activation()),
    Build("fatrelu_and_mul_triton", "plain", _activation(0.01)),
    Build("swiglu_oai_and_mul_triton", "plain", _activation(1.702, 7.0)),
    Build("swiglu_clamped_and_mul_triton", "plain", _activation(10.0)),
    Build("rotary_embedding_triton", "32 and 8 heads of 128", _rotary),
    Build("rotary_embedding_interleaved_triton", "32 and 8 heads of 128", _rotary),
    Build("multimodal_rotary_embedding_triton", "32 and 8 heads of 128", _multimodal),
    Build("reshape_and_cache_triton", "8 heads of 128", lambda: _stored(_BF16)),
    Build(
        "reshape_and_cache_fp8_triton",
        "float8_e4m3fn, 8 heads of 128",
        _stored_fp8(_E4M3),
        dims={"cache_dtype": "float8_e4m3fn"},
    ),
    Build(
        "reshape_and_cache_fp8_triton",
        "float8_e5m2, 8 heads of 128",
        _stored_fp8(_E5M2),
        dims={"cache_dtype": "float8_e5m2"},
    ),
)
