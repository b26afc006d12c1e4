"""Builds of quantizers, of norms that quantize, and of norms of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP32, _INT32, _UINT8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
_E4M3, _E5M2, _FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
_SCALE = meta(_FP32, 1)
_WIDTHS = (4096, 14336)


def _rows(width: int, *rest: object) -> Callable[[], tuple[Any, ...]]:
    return lambda: (meta(_BF16, 64, width), *rest)


def _of_widths(kernel: str, *rest: object) -> Iterable[Build]:
    return (Build(kernel, f"{width} wide", _rows(width, *rest)) for width in _WIDTHS)


def _fp8(kernel: str, width: int, dtype: torch.dtype, *rest: object) -> Build:
    name = str(dtype).removeprefix("torch.")
    return Build(kernel, f"{name}, {width} wide", _rows(width, *rest), dims={"out_dtype": name})


def _heads() -> tuple[Any, ...]:
    heads, kv_heads = meta(_BF16, 64, 32, 128), meta(_BF16, 64, 8, 128)
    return heads, kv_heads, meta(_BF16, 128), meta(_BF16, 128), 1e-6


def _gated(width: int, group_size: int, first: bool) -> Callable[[], tuple[Any, ...]]:
    x = meta(_BF16, 64, width)
    return lambda: (x, x, meta(_BF16, width), 1e-5, group_size, first)


def _packed(width: int, block_size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    scales = meta(dtype, 64, width // block_size)
    common = () if dtype == _UINT8 else (_SCALE,)
    return meta(_UINT8, 64, width // 2), scales, *common, _BF16


def _tiles(rows: int) -> Build:
    def arguments() -> tuple[Any, ...]:
        return meta(_UINT8, 64, 128), rows

    return Build("tile_scales_triton", f"{rows}x4", arguments, "uint8", {"rows_per_tile": rows})


BUILDS = (
    _fp8("quantize_fp8_static_triton", 4096, _E4M3, _SCALE, _E4M3),
    _fp8("quantize_fp8_static_triton", 4096, _E5M2, _SCALE, _E5M2),
    _fp8("quantize_fp8_static_triton", 4096, _FNUZ, _SCALE, _FNUZ),
    _fp8("quantize_fp8_dynamic_triton", 4096, _E4M3, _E4M3),
    _fp8("quantize_fp8_per_token_triton", 4096, _E4M3, _E4M3, None),
    _fp8("quantize_fp8_per_token_triton", 14336, _E4M3, _E4M3, 1.0),
    Build("quantize_fp8_blocks_triton", "128 of 4096", _rows(4096, 128, _E4M3, False)),
    Build("quantize_fp8_blocks_triton", "128 of 14336", _rows(14336, 128, _E4M3, True)),
    *_of_widths("quantize_int8_static_triton", _SCALE, meta(_INT32, 1)),
    *_of_widths("quantize_int8_per_token_triton"),
    *_of_widths("quantize_int8_per_token_asymmetric_triton"),
    *(
        _fp8("rms_norm_quantize_fp8_triton", width, _E4M3, meta(_BF16, width), _SCALE, 1e-6, _E4M3)
        for width in _WIDTHS
    ),
    *_of_widths("quantize_mxfp8_triton"),
    *_of_widths("quantize_mxfp4_triton"),
    *_of_widths("quantize_nvfp4_triton", _SCALE),
    Build("dequantize_mxfp4_triton", "4096 wide", lambda: _packed(4096, 32, _UINT8)),
    Build("dequantize_nvfp4_triton", "4096 wide", lambda: _packed(4096, 16, _E4M3)),
    _tiles(128),
    _tiles(8),
    Build("qk_norm_triton", "32 and 8 heads of 128", _heads),
    Build("l2_norm_triton", "16 heads of 128", lambda: (meta(_BF16, 64, 16, 128), 1e-6)),
    Build("gated_rms_norm_triton", "groups of 128", _gated(4096, 128, True)),
    Build("gated_rms_norm_triton", "one of 8192", _gated(8192, 8192, False)),
    Build("gated_rms_norm_triton", "one of 14336", _gated(14336, 14336, False)),
)
