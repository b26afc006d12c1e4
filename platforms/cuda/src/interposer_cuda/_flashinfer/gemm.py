"""GEMM of two quantized operands by FlashInfer on Blackwell GPUs.

FlashInfer rounds the output before a bias could be added, but the ops round once, after the bias.
Layers with a bias therefore use the Triton kernels. Call arguments are tested on the CPU against
stand-in functions; no GPU has run this module.

Dimensions: T tokens, I input features, O output features, M rows, C blocks per row.
Source: ``mm_fp4``, ``mm_mxfp8`` and ``gemm_fp8_nt_groupwise`` in flashinfer/gemm/gemm_base.py of
flashinfer-python 0.7.2, and the checks of its CUTLASS GEMMs: I and O are multiples of 32, and both
at least 128 for MXFP8; block scales in tiles of 128x4; rows of ``gemm_fp8_nt_groupwise`` in
multiples of 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch.nn import functional

from interposer import Request, Verdict
from interposer_cuda._providers import FLASHINFER_0_7
from interposer_ops.quantized_linear import tile_scales
from interposer_ops.triton import judge as judge_triton

_TILE = (128, 4)
_ROW_MULTIPLE = 4
_MODULE = "flashinfer.gemm"
# Keyword arguments that this module passes, checked against the installed functions.
_KEYWORDS = {
    "mm_fp4": {"block_size", "use_8x4_sf_layout", "backend", "use_nvfp4"},
    "mm_mxfp8": {"use_8x4_sf_layout", "backend"},
    "gemm_fp8_nt_groupwise": {"scale_granularity_mnk", "out", "backend"},
}
# Module of the Triton kernels, for layers with a bias.
_PORTABLE = "interposer_ops.triton"


def judge(request: Request) -> Verdict:
    """Refuse a missing or unsuitable FlashInfer or Triton, without importing either.

    Triton is required too, because layers with a bias use the Triton kernels.
    """
    verdict = FLASHINFER_0_7.judge()
    return verdict and judge_triton(request)


def confirm(request: Request) -> Verdict:
    """Refuse if the import of FlashInfer fails or a function's parameters differ."""
    del request
    return FLASHINFER_0_7.confirm(_MODULE, _KEYWORDS)


def prepare_nvfp4(
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """Pad and tile the scales to ``[M, C]`` for FlashInfer; leave a layer with a bias unchanged."""
    scales = weight_scales if bias is not None else _in_tiles(weight_scales)
    return {"weight": weight, "weight_scales": scales, "alpha": alpha, "bias": bias}


def nvfp4_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``nvfp4_linear`` with weights from ``prepare_nvfp4``."""
    if bias is not None:
        portable = _function(_PORTABLE, "nvfp4_linear_triton")
        return portable(x, x_scales, weight, weight_scales, alpha, bias, out_dtype)
    rows = _rows(x)
    out = rows.new_empty((len(rows), len(weight)), dtype=out_dtype)
    if len(rows):
        _function(_MODULE, "mm_fp4")(
            rows,
            weight.t(),
            _in_tiles(_rows(x_scales)),
            weight_scales.t(),
            alpha,
            out_dtype,
            out,
            block_size=16,
            use_8x4_sf_layout=False,
            backend="cutlass",
            use_nvfp4=True,
        )
    return out.view(*x.shape[:-1], len(weight))


def prepare_mxfp8(
    weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """Pad, tile and flatten the scales to ``[M C]``; leave a layer with a bias unchanged."""
    scales = weight_scales if bias is not None else _in_tiles(weight_scales).flatten()
    return {"weight": weight, "weight_scales": scales, "bias": bias}


def mxfp8_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``mxfp8_linear`` with weights from ``prepare_mxfp8``."""
    if bias is not None:
        portable = _function(_PORTABLE, "mxfp8_linear_triton")
        return portable(x, x_scales, weight, weight_scales, bias, out_dtype)
    rows = _rows(x)
    out = torch.empty((len(rows), len(weight)), dtype=out_dtype, device=x.device)
    if len(rows):
        _function(_MODULE, "mm_mxfp8")(
            rows,
            weight.t(),
            _in_tiles(_rows(x_scales)).flatten(),
            weight_scales,
            out,
            out_dtype,
            use_8x4_sf_layout=False,
            backend="cutlass",
        )
    return out.view(*x.shape[:-1], len(weight))


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    block_rows: int,
    block_columns: int,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``fp8_block_linear`` for blocks of 128 by 128."""
    if bias is not None:
        portable = _function(_PORTABLE, "fp8_block_linear_triton")
        blocks = block_rows, block_columns
        return portable(x, weight, x_scales, weight_scales, *blocks, bias, out_dtype)
    rows, scales = _rows(x), _rows(x_scales)
    num_rows = len(rows)
    padding_rows = -num_rows % _ROW_MULTIPLE
    if padding_rows:
        # pad() does not take 8-bit floats, so their bytes are padded.
        padded = functional.pad(rows.view(torch.uint8), (0, 0, 0, padding_rows))
        rows, scales = padded.view(x.dtype), functional.pad(scales, (0, 0, 0, padding_rows))
    out = torch.empty((len(rows), len(weight)), dtype=out_dtype, device=x.device)
    if len(rows):
        _function(_MODULE, "gemm_fp8_nt_groupwise")(
            rows,
            weight,
            scales,
            weight_scales,
            "K",
            scale_granularity_mnk=(1, block_rows, block_columns),
            out=out,
            backend="cutlass",
        )
    return out[:num_rows].view(*x.shape[:-1], len(weight))


@cache
def _function(module: str, name: str) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = getattr(import_module(module), name)
    return function


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Pad scales to M a multiple of 128 and C a multiple of 4, and reorder into 128x4 tiles."""
    rows, columns = scales.shape
    padded_shape = -(-rows // _TILE[0]) * _TILE[0], -(-columns // _TILE[1]) * _TILE[1]
    return tile_scales(scales, _TILE[0]).view(padded_shape)
