# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton linear layers of int8 inputs and 4-bit weights.

A tile of packed weights is unpacked in registers and multiplied as int8, code minus zero point. The
sum of a group is an exact int32, scaled and accumulated in float32.

T tokens, I input features, O output features, G inputs per scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer import Dim
from interposer_ops._triton.build import BF16, FP32, INT8, INT32, UINT8, Build, given
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

# The smallest tile that matrix instructions for int8 take.
_LEAST_TOKENS = 16
_LEAST_INPUTS = 32


# Not batch-invariant: the number of split-K parts, and so the order of float32 additions, depends
# on the number of tokens.
@triton_kernel(
    "w4a8_linear",
    dims={"group_size": Dim(at_most=524288)},
    judge="judge_integers",
    batch_invariant=False,
)
def w4a8_linear_triton(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scales: Tensor,
    x_zero_point: Tensor | None, weight_zero_points: Tensor | None,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``w4a8_linear``; sums of the weights correct for zero points of the inputs."""
    in_features, out_features = x.shape[-1], weight.shape[0]
    y = torch.empty((*x.shape[:-1], out_features), dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    num_tokens = rows.shape[0]
    group_size = in_features // weight_scales.shape[1]
    aligned = rows.stride(0) % _LEAST_INPUTS == 0 and in_features % _LEAST_INPUTS == 0
    max_tokens = max(_LEAST_TOKENS, triton.next_power_of_2(num_tokens))
    tile = _tile(x.device, group_size, max_tokens, aligned=aligned)
    num_parts, part_groups = tile.split(num_tokens, out_features, in_features // group_size)
    parts = allocate_parts(num_parts, num_tokens, y)
    grid = triton.cdiv(num_tokens, tile.tokens), triton.cdiv(out_features, tile.features)
    _linear[(*grid, num_parts)](
        rows, weight, x_scale, weight_scales, x_zero_point, weight_zero_points,
        bias if parts is None else None, y if parts is None else parts, num_tokens, rows.stride(0),
        # Stride 0 makes every row read the one scale of the tensor.
        0 if x_scale.numel() == 1 else 1,
        IN_FEATURES=in_features, OUT_FEATURES=out_features, GROUP_SIZE=group_size,
        PART_GROUPS=part_groups, **tile.options,
    )  # fmt: skip
    if parts is not None:
        reduce_parts(parts, y, bias)
    return y


@per_device
def _tile(device: torch.device, group_size: int, num_tokens: int, *, aligned: bool) -> FeatureTile:
    """Return the tile for matmuls of at most ``num_tokens`` rows, a power of two.

    All inputs of a loop step belong to one group, so that the last step of a group is partial
    unless 32 or a larger power of two divides the group. With partial steps or rows that are not
    ``aligned``, elements are loaded one by one; their addresses take registers from the tile.
    """
    divisor = group_size & -group_size
    has_full_steps = divisor >= _LEAST_INPUTS
    name = "w4a8_linear"
    if has_full_steps:
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


# Without this, triton compiles again for token counts and strides of 1 and of multiples of 16.
@triton.jit(do_not_specialize=["num_tokens", "x_scale_stride"])
def _linear(
    x, weight, x_scale, weight_scales, x_zero_point, weight_zero_points, bias, y, num_tokens,
    x_stride, x_scale_stride,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, PART_GROUPS: tl.constexpr,
):  # fmt: skip
    # The weight is the left operand: its rows fill matrix instructions when tokens are few, and
    # the left operand may come from registers, where the weight is unpacked.
    NUM_GROUPS: tl.constexpr = IN_FEATURES // GROUP_SIZE
    MASKED: tl.constexpr = GROUP_SIZE % INPUTS != 0
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    # Tokens and features past the end read token 0 or the last feature instead and are not stored.
    safe_token = tl.where(token < num_tokens, token, 0)
    row = tl.minimum(feature, OUT_FEATURES - 1)
    x_row = x + safe_token[None, :] * x_stride
    shift = 0
    if x_zero_point is not None:
        shift = tl.load(x_zero_point + safe_token * x_scale_stride)[None, :]
    total = tl.zeros((FEATURES, TOKENS), tl.float32)
    # Split-K: each program sums some of the groups; a second launch adds the parts in order.
    first_group = tl.program_id(2) * PART_GROUPS
    for group in range(first_group, tl.minimum(first_group + PART_GROUPS, NUM_GROUPS)):
        if weight_zero_points is not None:
            zero = tl.load(weight_zero_points + row * NUM_GROUPS + group).to(tl.int8)
        else:
            zero = tl.full((FEATURES,), 8, tl.int8)
        group_sum = tl.zeros((FEATURES, TOKENS), tl.int32)
        weight_sums = tl.zeros((FEATURES,), tl.int32)
        for start in range(0, GROUP_SIZE, INPUTS):
            first, end = group * GROUP_SIZE + start, (group + 1) * GROUP_SIZE
            weights = load_nibbles(
                weight, row, first, end, IN_FEATURES, GROUP_SIZE, MASKED, INPUTS, tl.int8
            )
            weights -= zero[:, None]
            element = first + tl.arange(0, INPUTS)
            inside = element < end
            inputs = load_masked(x_row + element[:, None], inside[:, None], MASKED)
            group_sum = tl.dot(weights, inputs, group_sum, out_dtype=tl.int32)
            if x_zero_point is not None:
                valid_weights = tl.where(inside[None, :], weights, 0) if MASKED else weights
                weight_sums += tl.sum(valid_weights.to(tl.int32), axis=1)
        if x_zero_point is not None:
            group_sum -= weight_sums[:, None] * shift
        factor = tl.load(weight_scales + row * NUM_GROUPS + group)
        total = tl.fma(group_sum.to(tl.float32), factor[:, None], total)
    total *= tl.load(x_scale + safe_token * x_scale_stride)[None, :]
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    part = tl.program_id(2).to(tl.int64) * num_tokens
    target = y + (part + token[None, :]) * OUT_FEATURES + feature[:, None]
    inside = (token < num_tokens)[None, :] & (feature < OUT_FEATURES)[:, None]
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)


def _build(
    label: str, tokens: int, outputs: int, group_size: int = 128, *, asymmetric: bool = False,
    bias: bool = False,
) -> Build:  # fmt: skip
    grouped = (outputs, 4096 // group_size)
    arguments = given(
        *((INT8, tokens, 4096), (UINT8, outputs, 2048), (FP32, tokens, 1), (FP32, *grouped)),
        *(((INT32, tokens, 1), (UINT8, *grouped)) if asymmetric else (None, None)),
        (BF16, outputs) if bias else None,
        BF16,
    )
    # Triton multiplies integers only on sm_80 and newer.
    without = frozenset({"sm_75"})
    dims = {"group_size": group_size}
    return Build("w4a8_linear_triton", label, arguments, "bfloat16", dims, True, without)


BUILDS = (
    _build("1 token, 4096 to 4096, groups of 128", 1, 4096),
    _build("64 tokens, 4096 to 14336, groups of 128", 64, 14336),
    _build("4096 tokens, 4096 to 14336, groups of 128", 4096, 14336),
    _build("4096 tokens, 4096 to 4096, groups of 32", 4096, 4096, 32),
    _build("4096 tokens, 4096 to 4096, one scale per output, bias", 4096, 4096, 4096, bias=True),
    _build("64 tokens, zero points of both operands", 64, 4096, asymmetric=True),
)
