"""Builds of mixtures of experts, and of the orders of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_E4M3, _E5M2, _UINT8, _INT32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int32


class _Model(NamedTuple):
    """Sizes of a model's experts."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int


_MIXTRAL = _Model(8, 4096, 14336, 2)
_DEEPSEEK = _Model(64, 2048, 1408, 6)
_GPT_OSS = _Model(32, 2880, 2880, 4)


def _tokens(model: _Model, count: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return meta(dtype, count, model.hidden_size)


def _routed(model: _Model, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return meta(_FP32, count, model.top_k), meta(_INT32, count, model.top_k)


def _plain(
    model: _Model,
    count: int,
    dtype: torch.dtype = _BF16,
    *,
    activation: str = "silu",
    biased: bool = False,
) -> Callable[[], tuple[Any, ...]]:
    experts, hidden, inner, _ = model
    return lambda: (
        _tokens(model, count, dtype),
        meta(dtype, experts, 2 * inner, hidden),
        meta(dtype, experts, 2 * inner) if biased else None,
        meta(dtype, experts, hidden, inner),
        meta(dtype, experts, hidden) if biased else None,
        *_routed(model, count),
        activation,
    )


def _fp8(
    model: _Model, count: int, dtype: torch.dtype = _E4M3, block: int = 0
) -> Callable[[], tuple[Any, ...]]:
    """Make arguments with a scale per block of so many rows and columns, or one per channel."""
    experts, hidden, inner, _ = model

    def scale(rows: int, columns: int) -> torch.Tensor:
        shape = (rows // block, columns // block) if block else (rows, 1)
        return meta(_FP32, experts, *shape)

    return lambda: (
        _tokens(model, count),
        meta(dtype, experts, 2 * inner, hidden),
        scale(2 * inner, hidden),
        meta(dtype, experts, hidden, inner),
        scale(hidden, inner),
        *_routed(model, count),
        "silu",
    )


def _w4(
    model: _Model, count: int, dtype: torch.dtype = _BF16, group: int = 128
) -> Callable[[], tuple[Any, ...]]:
    experts, hidden, inner, _ = model
    return lambda: (
        _tokens(model, count, dtype),
        meta(_UINT8, experts, 2 * inner, hidden // 2),
        meta(dtype, experts, 2 * inner, hidden // group),
        meta(_UINT8, experts, hidden, inner // 2),
        meta(dtype, experts, hidden, inner // group),
        *_routed(model, count),
        "silu",
    )


def _mxfp4(model: _Model, count: int, dtype: torch.dtype = _BF16) -> Callable[[], tuple[Any, ...]]:
    experts, hidden, inner, _ = model
    return lambda: (
        _tokens(model, count, dtype),
        meta(_UINT8, experts, 2 * inner, hidden // 2),
        meta(_UINT8, experts, 2 * inner, hidden // 32),
        meta(dtype, experts, 2 * inner),
        meta(_UINT8, experts, hidden, inner // 2),
        meta(_UINT8, experts, hidden, inner // 32),
        meta(dtype, experts, hidden),
        *_routed(model, count),
        "swiglu_oai",
    )


def _permuted(model: _Model, count: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (_tokens(model, count), _routed(model, count)[1], model.num_experts)


def _unpermuted(model: _Model, count: int) -> Callable[[], tuple[Any, ...]]:
    weights, positions = _routed(model, count)
    return lambda: (meta(_BF16, count * model.top_k, model.hidden_size), positions, weights)


def _summed(model: _Model, count: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (meta(_BF16, count, model.top_k, model.hidden_size),)


def _aligned(model: _Model, count: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (_routed(model, count)[1], model.num_experts, 64)


_EXPERTS, _EXPERTS_FP8 = "fused_experts_triton", "fused_experts_fp8_triton"
_EXPERTS_W4, _EXPERTS_MX = "fused_experts_w4a16_triton", "fused_experts_mxfp4_triton"
_FEW, _MANY = 64, 4096  # tokens of a step that decodes, and of one that prefills
_GROUPS = {"group_size": 128}

BUILDS = (
    Build(_EXPERTS, "64 tokens, 8 of 4096 x 14336", _plain(_MIXTRAL, _FEW), matrix=True),
    Build(_EXPERTS, "4096 tokens, 8 of 4096 x 14336", _plain(_MIXTRAL, _MANY), matrix=True),
    Build(_EXPERTS, "64 tokens, 64 of 2048 x 1408", _plain(_DEEPSEEK, _FEW), matrix=True),
    Build(_EXPERTS, "4096 tokens, 64 of 2048 x 1408", _plain(_DEEPSEEK, _MANY), matrix=True),
    Build(
        _EXPERTS,
        "swiglu_oai with biases, 32 of 2880 x 2880",
        _plain(_GPT_OSS, _FEW, activation="swiglu_oai", biased=True),
        matrix=True,
    ),
    Build(
        _EXPERTS,
        "float16, gelu, 8 of 4096 x 14336",
        _plain(_MIXTRAL, _MANY, _FP16, activation="gelu"),
        "float16",
        matrix=True,
    ),
    Build(_EXPERTS, "float32, 8 of 4096 x 14336", _plain(_MIXTRAL, _MANY, _FP32), "float32"),
    Build(
        _EXPERTS_FP8,
        "float8_e4m3fn, 4096 tokens, 8 of 4096 x 14336, per channel",
        _fp8(_MIXTRAL, _MANY),
        matrix=True,
    ),
    Build(
        _EXPERTS_FP8,
        "float8_e4m3fn, 64 tokens, 64 of 2048 x 1408, blocks of 128",
        _fp8(_DEEPSEEK, _FEW, block=128),
        matrix=True,
    ),
    Build(
        _EXPERTS_FP8,
        "float8_e5m2, 4096 tokens, 64 of 2048 x 1408, blocks of 128",
        _fp8(_DEEPSEEK, _MANY, _E5M2, block=128),
        matrix=True,
    ),
    Build(
        _EXPERTS_W4,
        "4096 tokens, 8 of 4096 x 14336, groups of 128",
        _w4(_MIXTRAL, _MANY),
        dims=_GROUPS,
        matrix=True,
    ),
    Build(
        _EXPERTS_W4,
        "64 tokens, 64 of 2048 x 1408, groups of 128",
        _w4(_DEEPSEEK, _FEW),
        dims=_GROUPS,
        matrix=True,
    ),
    Build(
        _EXPERTS_W4,
        "float16, 64 tokens, 64 of 2048 x 1408, groups of 32",
        _w4(_DEEPSEEK, _FEW, _FP16, 32),
        "float16",
        {"group_size": 32},
        matrix=True,
    ),
    Build(_EXPERTS_MX, "64 tokens, 32 of 2880 x 2880", _mxfp4(_GPT_OSS, _FEW), matrix=True),
    Build(_EXPERTS_MX, "4096 tokens, 32 of 2880 x 2880", _mxfp4(_GPT_OSS, _MANY), matrix=True),
    Build(
        _EXPERTS_MX,
        "float16, 64 tokens, 32 of 2880 x 2880",
        _mxfp4(_GPT_OSS, _FEW, _FP16),
        "float16",
        matrix=True,
    ),
    Build("moe_sum_triton", "2 rows of 4096", _summed(_MIXTRAL, _FEW)),
    Build("moe_sum_triton", "6 rows of 2048", _summed(_DEEPSEEK, _MANY)),
    Build("moe_permute_triton", "6 of 64 experts, 2048 wide", _permuted(_DEEPSEEK, _FEW)),
    Build("moe_unpermute_triton", "6 rows of 2048", _unpermuted(_DEEPSEEK, _MANY)),
    Build("moe_align_blocks_triton", "6 of 64 experts", _aligned(_DEEPSEEK, _MANY), "int32"),
)
