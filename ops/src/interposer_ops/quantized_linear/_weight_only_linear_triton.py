# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton linear layers of float inputs and 4-bit or 8-bit integer weights.

A tile of weights is unpacked in registers and multiplied as integers, code minus zero point, which
bfloat16 and float16 hold exactly; the scale is applied to the sum of a group. So dequantized
weights are never rounded, for any dtype of the scales.

T tokens, I input features, O output features, G inputs per scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP16, FP32, INT8, UINT8, Build, dtype_name, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops._triton.rows import as_rows
from interposer_ops.quantized_linear._linear_tiles_triton import (
    FeatureTile,
    allocate_parts,
    load_masked,
    load_nibbles,
    parameters_by_tokens,
    reduce_parts,
)

_LEAST = 16  # the smallest side of a tile that matrix instructions take
# The fewest inputs of a step. Triton (3.6, 3.7) assigns eight adjacent inputs of a 4-bit weight to
# each of the four threads of a row; in a step of 16 inputs, threads would read the same inputs
# twice. On an H200, groups of two then gave twice the correct result.
_LEAST_INPUTS = 32


@triton_kernel("w4a16_linear", batch_invariant=False)
def w4a16_linear_triton(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
    zero_points: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``w4a16_linear`` in Triton: float inputs times a 4-bit integer weight."""
    return _launch_linear(x, weight, scale, bias, zero_points, 8)


@triton_kernel("w8a16_linear", batch_invariant=False)
def w8a16_linear_triton(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
    zero_points: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``w8a16_linear`` in Triton: float inputs times an int8 weight."""
    return _launch_linear(x, weight, scale, bias, zero_points, 0)


def _launch_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
    zero_points: Tensor | None, default_zero_point: int,
) -> Tensor:  # fmt: skip
    in_features, out_features = x.shape[-1], weight.shape[0]
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    num_tokens = rows.shape[0]
    group_size = in_features * out_features // scale.numel()
    aligned = rows.stride(0) % _LEAST == 0 and in_features % (2 * _LEAST) == 0
    max_tokens = max(_LEAST, triton.next_power_of_2(num_tokens))
    tile = _tile(x.device, x.dtype, group_size, max_tokens, aligned=aligned)
    num_steps = in_features // group_size * triton.cdiv(group_size, tile.inputs)
    num_parts, part_steps = tile.split(num_tokens, out_features, num_steps)
    parts = allocate_parts(num_parts, num_tokens, y)
    grid = triton.cdiv(num_tokens, tile.tokens), triton.cdiv(out_features, tile.features)
    _linear[(*grid, num_parts)](
        rows, weight, scale, bias if parts is None else None, zero_points,
        y if parts is None else parts, num_tokens, rows.stride(0),
        IN_FEATURES=in_features, OUT_FEATURES=out_features, GROUP_SIZE=group_size,
        PACKED=weight.dtype == torch.uint8, DEFAULT_ZERO_POINT=default_zero_point,
        PART_STEPS=part_steps, **tile.options,
    )  # fmt: skip
    if parts is not None:
        reduce_parts(parts, y, bias)
    return y


@per_device
def _tile(
    device: torch.device, dtype: torch.dtype, group_size: int, num_tokens: int, *, aligned: bool
) -> FeatureTile:
    """Return the tile for matmuls of at most ``num_tokens`` rows, a power of two.

    All inputs of a loop step belong to one group, so that the last step of a group is partial
    unless 32 or a larger power of two divides the group. With partial steps or rows that are not
    ``aligned``, elements are loaded one by one; their addresses take registers from the tile.
    """
    name = "weight_only_linear"
    divisor = group_size & -group_size
    has_full_steps = divisor >= _LEAST_INPUTS
    if dtype == torch.float32:
        parameters = parameters_for(f"{name}_float32", device)
    elif has_full_steps:
        parameters = parameters_by_tokens(name, device, num_tokens)
    else:
        parameters = parameters_for(f"{name}_few", device)
    blocks = parameters.blocks
    inputs = divisor if has_full_steps and aligned else _LEAST_INPUTS
    return FeatureTile(
        blocks["features"],
        min(num_tokens, blocks["tokens"]),
        min(inputs, blocks["inputs"]),
        parameters.compiled,
        blocks["programs"],
    )


@triton.jit
def _linear(
    x, weight, scale, bias, zero_points, y, num_tokens, x_stride,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr,
    PACKED: tl.constexpr, DEFAULT_ZERO_POINT: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, PART_STEPS: tl.constexpr,
):  # fmt: skip
    # The weight is the left operand: its rows fill matrix instructions when tokens are few, and
    # the left operand may come from registers, where the weight is unpacked.
    NUM_GROUPS: tl.constexpr = IN_FEATURES // GROUP_SIZE
    STEPS: tl.constexpr = (GROUP_SIZE + INPUTS - 1) // INPUTS
    MASKED: tl.constexpr = GROUP_SIZE % INPUTS != 0
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    token_mask = (token < num_tokens)[None, :]
    x_row = x + token[None, :] * x_stride
    # Features past the end read the last feature instead and are not stored.
    row = tl.minimum(feature, OUT_FEATURES - 1)
    total = tl.zeros((FEATURES, TOKENS), tl.float32)
    # Split-K: each program sums some of the steps; a second launch adds the parts in order.
    first_step = tl.program_id(2) * PART_STEPS
    for step in range(first_step, tl.minimum(first_step + PART_STEPS, NUM_GROUPS * STEPS)):
        group = step // STEPS
        first = group * GROUP_SIZE + (step % STEPS) * INPUTS
        end = (group + 1) * GROUP_SIZE
        quantized = _load_quantized(
            weight, row, first, end, IN_FEATURES, GROUP_SIZE, PACKED, MASKED, INPUTS
        )
        if zero_points is not None:
            zero = tl.load(zero_points + row * NUM_GROUPS + group).to(tl.float32)
            integers = quantized - zero[:, None]
        else:
            integers = quantized - DEFAULT_ZERO_POINT
        element = first + tl.arange(0, INPUTS)[:, None]
        valid = (token_mask & (element < end)) if MASKED else token_mask
        inputs = tl.load(x_row + element, mask=valid, other=0.0)
        weights = integers.to(x.dtype.element_ty)
        if NUM_GROUPS == 1:
            total = tl.dot(weights, inputs, total, input_precision="ieee")
        else:
            factor = tl.load(scale + row * NUM_GROUPS + group).to(tl.float32)
            total += tl.dot(weights, inputs, input_precision="ieee") * factor[:, None]
    if NUM_GROUPS == 1:
        total *= tl.load(scale + row).to(tl.float32)[:, None]
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    inside = token_mask & (feature < OUT_FEATURES)[:, None]
    part = tl.program_id(2).to(tl.int64) * num_tokens
    target = y + (part + token[None, :]) * OUT_FEATURES + feature[:, None]
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load_quantized(
    weight, row, first, end,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Load quantized values of ``INPUTS`` inputs from ``first`` on; undefined from ``end`` on."""
    if PACKED:
        quantized = load_nibbles(
            weight, row, first, end, IN_FEATURES, GROUP_SIZE, MASKED, INPUTS, tl.float32
        )
    else:
        element = first + tl.arange(0, INPUTS)[None, :]
        pointer = weight + row[:, None] * IN_FEATURES + element
        quantized = load_masked(pointer, element < end, MASKED).to(tl.float32)
    return quantized


def _w4(
    label: str, tokens: int, outputs: int, dtype: torch.dtype = BF16, group_size: int = 128,
    symmetric: bool = False,
) -> Build:  # fmt: skip
    grouped = (outputs, 4096 // group_size)
    zero_points = None if symmetric else (UINT8, *grouped)
    operands = (dtype, tokens, 4096), (UINT8, outputs, 2048), (dtype, *grouped)
    arguments = given(*operands, None, zero_points)
    return Build("w4a16_linear_triton", label, arguments, dtype_name(dtype), matrix=dtype != FP32)


def _w8(
    label: str, tokens: int, outputs: int, dtype: torch.dtype = BF16, group_size: int = 4096
) -> Build:
    grouped = (outputs, 4096 // group_size)
    zero_points = (INT8, *grouped) if group_size < 4096 else None
    operands = (dtype, tokens, 4096), (INT8, outputs, 4096), (FP32, *grouped)
    arguments = given(*operands, (dtype, outputs), zero_points)
    return Build("w8a16_linear_triton", label, arguments, dtype_name(dtype), matrix=dtype != FP32)


_HALF = "float16, 4096 tokens, 4096 to 4096, groups of"
BUILDS = (
    _w4("1 token, 4096 to 4096, groups of 128", 1, 4096),
    _w4("64 tokens, 4096 to 14336, groups of 128", 64, 14336),
    _w4("4096 tokens, 4096 to 14336, groups of 128", 4096, 14336),
    _w4(f"{_HALF} 32, symmetric", 4096, 4096, FP16, 32, symmetric=True),
    _w4("float32, 4096 tokens, groups of 128", 4096, 4096, FP32),
    _w8("1 token, 4096 to 14336, one scale per output", 1, 14336),
    _w8("64 tokens, 4096 to 4096, one scale per output", 64, 4096),
    _w8("4096 tokens, 4096 to 14336, one scale per output", 4096, 14336),
    _w8(f"{_HALF} 128", 4096, 4096, FP16, 128),
    _w8("float32, 64 tokens, one scale per output", 64, 4096, FP32),
)
