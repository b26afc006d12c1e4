# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels for multi-LoRA.

A program has one tile of tokens and one adapter, computes the rows of the tile that use the
adapter, and ends at once if no row does. Exactly one program computes a row, so that no atomic
additions are needed.

T tokens, I input features, O output features of the adapters, A adapters, R rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP16, FP32, INT64, Build, dtype_name, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops.quantized_linear._linear_tiles_triton import FeatureTile

_LEAST = 16  # the smallest side of a tile that matrix instructions take


@triton_kernel("lora_shrink")
def lora_shrink_triton(x: Tensor, lora_a: Tensor, adapter_ids: Tensor, scale: float) -> Tensor:
    """Compute ``lora_shrink`` in Triton: rows times the A matrix of their adapter."""
    num_tokens = x.shape[0]
    num_adapters, rank, in_features = lora_a.shape
    y = torch.empty((num_tokens, rank), dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y
    tile = _shrink_tile(x.device, x.dtype, rank, in_features)
    grid = (
        triton.cdiv(num_tokens, tile.tokens),
        triton.cdiv(rank, tile.features),
        max(1, num_adapters),
    )
    _shrink[grid](
        x, lora_a, adapter_ids, y, float(scale), num_tokens, x.stride(0),
        WIDTH=in_features, RANK=rank, **tile.options,
    )  # fmt: skip
    return y


@triton_kernel("lora_expand")
def lora_expand_triton(
    shrunk: Tensor, lora_b: Tensor, adapter_ids: Tensor, y: Tensor,
    offset: int,
) -> None:  # fmt: skip
    """Compute ``lora_expand`` in Triton: add rows times the B matrix of their adapter to ``y``."""
    num_tokens = shrunk.shape[0]
    num_adapters, out_features, rank = lora_b.shape
    if num_tokens * out_features * num_adapters == 0:
        return
    tile = _expand_tile(y.device, y.dtype, rank)
    grid = (
        triton.cdiv(num_tokens, tile.tokens),
        triton.cdiv(out_features, tile.features),
        num_adapters,
    )
    _expand[grid](
        shrunk, lora_b, adapter_ids, y[:, offset : offset + out_features], num_tokens,
        shrunk.stride(0), y.stride(0), OUTPUTS=out_features, RANK=rank, **tile.options,
    )  # fmt: skip


@per_device
def _shrink_tile(
    device: torch.device, dtype: torch.dtype, rank: int, in_features: int
) -> FeatureTile:
    return _tile("lora_shrink", device, dtype, rank, in_features)


@per_device
def _expand_tile(device: torch.device, dtype: torch.dtype, rank: int) -> FeatureTile:
    return _tile("lora_expand", device, dtype, None, rank)


def _tile(
    name: str, device: torch.device, dtype: torch.dtype, columns: int | None, inputs: int
) -> FeatureTile:
    """Return the tile of ``name``, limited to the existing columns and inputs."""
    parameters = parameters_for(f"{name}_float32" if dtype == torch.float32 else name, device)
    blocks = parameters.blocks
    max_columns = blocks["columns"] if columns is None else triton.next_power_of_2(columns)
    return FeatureTile(
        max(_LEAST, min(max_columns, blocks["columns"])),
        blocks["tokens"],
        max(_LEAST, min(triton.next_power_of_2(inputs), blocks["inputs"])),
        parameters.compiled,
    )


@triton.jit
def _shrink(
    x, lora_a, adapter_ids, y, scale, num_tokens, x_stride,
    WIDTH: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    adapter = tl.program_id(2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    # -2 for rows past the end: no adapter, and unlike -1 no zeros to store.
    token_adapter = tl.load(adapter_ids + token, mask=token < num_tokens, other=-2)
    uses_adapter = token_adapter == adapter
    # The programs of adapter 0 also store the zeros of rows without adapter.
    store_mask = uses_adapter | ((token_adapter == -1) & (adapter == 0))
    column = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    # Columns past the end compute the last column again and are not stored.
    row = adapter.to(tl.int64) * RANK + tl.minimum(column, RANK - 1)
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    # The range is empty if no row of the tile uses the adapter.
    for first in range(0, tl.max(uses_adapter.to(tl.int32)) * WIDTH, INPUTS):
        element = first + tl.arange(0, INPUTS)
        inside = element < WIDTH
        inputs = tl.load(
            x + token[:, None] * x_stride + element[None, :],
            mask=uses_adapter[:, None] & inside[None, :],
            other=0.0,
        )
        matrix = lora_a + row[None, :] * WIDTH + element[:, None]
        if WIDTH % INPUTS == 0:
            weights = tl.load(matrix)
        else:
            weights = tl.load(matrix, mask=inside[:, None], other=0.0)
        total = tl.dot(inputs, weights, total, input_precision="ieee")
    result = tl.where(uses_adapter[:, None], total * scale, 0.0)
    target = y + token[:, None] * RANK + column[None, :]
    tl.store(target, result, mask=store_mask[:, None] & (column < RANK)[None, :])


@triton.jit
def _expand(
    shrunk, lora_b, adapter_ids, y, num_tokens, shrunk_stride, y_stride,
    OUTPUTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    adapter = tl.program_id(2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    uses_adapter = tl.load(adapter_ids + token, mask=token < num_tokens, other=-1) == adapter
    if tl.max(uses_adapter.to(tl.int32)) > 0:
        column = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
        row = adapter.to(tl.int64) * OUTPUTS + tl.minimum(column, OUTPUTS - 1)
        total = tl.zeros((TOKENS, FEATURES), tl.float32)
        for first in range(0, RANK, INPUTS):
            element = first + tl.arange(0, INPUTS)
            inside = element < RANK
            inputs = tl.load(
                shrunk + token[:, None] * shrunk_stride + element[None, :],
                mask=uses_adapter[:, None] & inside[None, :],
                other=0.0,
            )
            matrix = lora_b + row[None, :] * RANK + element[:, None]
            weights = tl.load(matrix, mask=inside[:, None], other=0.0)
            total = _add_matmul(total, inputs, weights)
        pointer = y + token[:, None] * y_stride + column[None, :]
        store_mask = uses_adapter[:, None] & (column < OUTPUTS)[None, :]
        before = tl.load(pointer, mask=store_mask, other=0.0).to(tl.float32)
        tl.store(pointer, (before + total).to(y.dtype.element_ty), mask=store_mask)


@triton.jit
def _add_matmul(total, inputs, weights):
    """Return ``total + inputs @ weights`` for float32 ``inputs``, with the precision of float32.

    Matrix instructions multiply in bfloat16: a float32 number is split into a sum of three bfloat16
    numbers, a float16 number into a sum of two.
    """
    if weights.dtype == tl.float32:
        total = tl.dot(inputs, weights, total, input_precision="ieee")
    else:
        # Small products are added first; added to a large sum they would be rounded away.
        high = inputs.to(tl.bfloat16)
        remainder = _rounding_error(inputs, high)
        middle = remainder.to(tl.bfloat16)
        low = _rounding_error(remainder, middle).to(tl.bfloat16)
        if weights.dtype == tl.float16:
            wide = weights.to(tl.float32)
            weights_high = wide.to(tl.bfloat16)
            weights_low = _rounding_error(wide, weights_high).to(tl.bfloat16)
            total = tl.dot(middle, weights_low, tl.dot(high, weights_low, total))
        else:
            weights_high = weights
        total = tl.dot(low, weights_high, total)
        total = tl.dot(middle, weights_high, total)
        total = tl.dot(high, weights_high, total)
    return total


@triton.jit
def _rounding_error(number, rounded):
    """Return the rounding error ``number - rounded``, and 0 for infinities."""
    wide = rounded.to(tl.float32)
    return tl.where(number == wide, 0.0, number - wide)


def _shrink_build(label: str, rank: int, dtype: torch.dtype = BF16) -> Build:
    arguments = given((dtype, 64, 4096), (dtype, 8, rank, 4096), (INT64, 64), 0.5)
    return Build("lora_shrink_triton", label, arguments, dtype_name(dtype), matrix=dtype != FP32)


def _expand_build(label: str, rank: int, dtype: torch.dtype = BF16) -> Build:
    matrices, y = (dtype, 8, 4096, rank), (dtype, 64, 6144)
    arguments = given((FP32, 64, rank), matrices, (INT64, 64), y, 1024)
    return Build("lora_expand_triton", label, arguments, dtype_name(dtype), matrix=dtype != FP32)


BUILDS = (
    _shrink_build("8 adapters of rank 16, 4096 inputs", 16),
    _shrink_build("8 adapters of rank 64, 4096 inputs", 64),
    _shrink_build("float16, 8 adapters of rank 8", 8, FP16),
    _shrink_build("float32, 8 adapters of rank 64", 64, FP32),
    _expand_build("8 adapters of rank 16, 4096 outputs", 16),
    _expand_build("8 adapters of rank 64, 4096 outputs", 64),
    _expand_build("float16, 8 adapters of rank 64", 64, FP16),
    _expand_build("float32, 8 adapters of rank 64", 64, FP32),
)
