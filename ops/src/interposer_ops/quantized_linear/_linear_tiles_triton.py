# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Tiles of kernels that multiply rows by a weight. T rows, I input features, O output features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.availability import MOST_SPLIT_ROWS
from interposer_ops._triton.float8_operands import decoded
from interposer_ops._triton.parameters import Parameters, parameters_for, per_device

STEPS = tuple(
    (f"{tokens} tokens, 4096 to {outputs}", tokens, outputs)
    for tokens, outputs in ((1, 4096), (64, 14336), (4096, 14336))
)
"""Builds of an 8B model's sizes: a step of one sequence, of some, and a prefill."""


# A part of a sum is written and read again, so that it is not of fewer steps.
_LEAST_STEPS = 4


class LinearTile(NamedTuple):
    """The tile that a program computes, and its compilation.

    Attributes:
        rows: how many rows of the result.
        outputs: how many of its columns.
        inputs: step of the loop over the input features.
        group: how many programs follow each other down the rows before they go on to the next
            outputs, so that what both read is still in the cache.
        operand_bits: bits of the floats that matrix instructions are given at least: 16 where those
            of 8-bit floats add in less than float32.
        most: of a tile for few rows, up to how many of them it is taken.
    """

    rows: int
    outputs: int
    inputs: int
    group: int
    compiled: Mapping[str, int]
    operand_bits: int = 8
    most: int = 0

    def num_programs(self, num_rows: int, out_features: int) -> int:
        """Return how many programs cover the result."""
        return -(-num_rows // self.rows) * -(-out_features // self.outputs)

    @property
    def options(self) -> dict[str, int]:
        """The launch options of a kernel with such tiles."""
        sizes = {"ROW_TILE": self.rows, "OUTPUT_TILE": self.outputs, "STEP": self.inputs}
        return {**sizes, "GROUP": self.group, **self.compiled}


class FeatureTile(NamedTuple):
    """Output features, tokens and inputs of one step, and how it is compiled.

    Attributes:
        programs: about how many fill the device, for which sums are split; 1 splits none.
    """

    features: int
    tokens: int
    inputs: int
    compiled: Mapping[str, int]
    programs: int = 1

    def split(self, num_tokens: int, out_features: int, num_steps: int) -> tuple[int, int]:
        """Return how many parts there are of a sum of so many steps, and the steps of each."""
        tiles = -(-num_tokens // self.tokens) * -(-out_features // self.features)
        wanted = max(1, min(self.programs // tiles, num_steps // _LEAST_STEPS))
        each = -(-num_steps // wanted)
        return -(-num_steps // each), each

    @property
    def options(self) -> dict[str, int]:
        """The launch options of a kernel with such tiles."""
        sizes = {"FEATURES": self.features, "TOKENS": self.tokens, "INPUTS": self.inputs}
        return {**sizes, **self.compiled}


def parameters_of(kernel: str, device: torch.device, num_tokens: int) -> Parameters:
    """Return those of ``kernel``_few up to 16 tokens, else of ``kernel``_some up to its tokens."""
    if num_tokens <= MOST_SPLIT_ROWS:
        return parameters_for(f"{kernel}_few", device)
    some = parameters_for(f"{kernel}_some", device)
    return some if num_tokens <= some.blocks["tokens"] else parameters_for(kernel, device)


def linear_tile(kernel: str, device: torch.device, num_rows: int) -> LinearTile:
    """Return the tile of ``kernel``, or that of ``kernel``_few where there are few rows."""
    few = _tile(f"{kernel}_few", device)
    return few if num_rows <= few.most else _tile(kernel, device)


@per_device
def _tile(kernel: str, device: torch.device) -> LinearTile:
    parameters = parameters_for(kernel, device)
    return LinearTile(**parameters.blocks, compiled=parameters.compiled)


_JOINED = 1024  # outputs of a program that adds parts


def parts_of_sum(num_parts: int, num_tokens: int, y: Tensor) -> Tensor | None:
    """Return memory for the parts of ``y``, ``[P, T, O]`` in float32; None where it is whole."""
    if num_parts == 1:
        return None
    shape = (num_parts, num_tokens, y.shape[-1])
    return torch.empty(shape, dtype=torch.float32, device=y.device)


def join_parts(
    parts: Tensor, y: Tensor, bias: Tensor | None, x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None, x_scale_stride: int = 0, weight_scale_stride: int = 0,
) -> None:  # fmt: skip
    """Fill ``y`` with sums of which programs left parts, added in their order.

    P parts, T tokens, O output features.

    Args:
        parts: ``[P, T, O]``, float32.
        y: ``[..., O]`` of T rows.
        bias: ``[O]``.
        x_scale, weight_scale: factors of rows and outputs, one for all where the stride is 0.
    """
    num_parts, num_rows, out_features = parts.shape
    width = min(_JOINED, triton.next_power_of_2(out_features))
    _join_parts[(num_rows, -(-out_features // width))](
        parts, x_scale, weight_scale, bias, y, num_rows, x_scale_stride, weight_scale_stride,
        OUTPUTS=out_features, PARTS=num_parts, WIDTH=width, num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "x_scale_stride", "weight_scale_stride"])
def _join_parts(
    parts, x_scale, weight_scale, bias, y, num_rows, x_scale_stride, weight_scale_stride,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = output < OUTPUTS
    parts += row * OUTPUTS + output
    total = tl.zeros([WIDTH], tl.float32)
    for _ in range(PARTS):
        total += tl.load(parts, mask=inside, other=0.0)
        parts += num_rows * OUTPUTS
    if x_scale is not None:
        total *= tl.load(x_scale + row * x_scale_stride)
        total *= tl.load(weight_scale + output * weight_scale_stride, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * OUTPUTS + output, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def place_of(
    num_rows,
    OUTPUTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the rows, int64, and the outputs of this program; past the end they start again."""
    program = tl.program_id(0)
    down = tl.cdiv(num_rows, ROW_TILE)
    across: tl.constexpr = (OUTPUTS + OUTPUT_TILE - 1) // OUTPUT_TILE
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = program % (GROUP * across)
    row = (first + within % height).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    output = within // height * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    return row, output


@triton.jit
def tiles(x, weight, start, column, INPUTS: tl.constexpr, WHOLE: tl.constexpr):
    """Return the tiles of both operands at ``start``; zeros past the last input."""
    if WHOLE:
        a = tl.load(x + start)
        b = tl.load(weight + start)
    else:
        inside = start + column < INPUTS
        a = tl.load(x + start, mask=inside[None, :], other=0.0)
        b = tl.load(weight + start, mask=inside[:, None], other=0.0)
    return a, b


@triton.jit
def product(a, b, total, STEP: tl.constexpr, X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr):
    """Return ``total`` plus the product of tiles of floats, of 8 bits or else "plain"."""
    if X_FORMAT == "plain":
        total = tl.dot(a, b, total)
    elif X_FORMAT == "stored":
        # Where the instruction adds in less than float32, its sums leave it after every step.
        total = tl.dot(a, b, total, max_num_imprecise_acc=STEP)
    else:
        total = tl.dot(decoded(a, X_FORMAT), decoded(b, WEIGHT_FORMAT), total)
    return total


@triton.jit
def stored(result, bias, y, row, output, known, num_rows, OUTPUTS: tl.constexpr):
    """Add the bias and store what there are rows and outputs of, in the dtype of ``y``."""
    if bias is not None:
        result += tl.load(bias + known).to(tl.float32)[None, :]
    target = y + row[:, None] * OUTPUTS + output[None, :]
    inside = (row < num_rows)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(target, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def nibbles(
    weight, row, first, end,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, MASKED: tl.constexpr,
    INPUTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return codes of four bits from input ``first`` on, any number for those from ``end`` on."""
    if GROUP_SIZE % 2 == 0:
        pair = first // 2 + tl.arange(0, INPUTS // 2)[None, :]
        both = loaded(weight + row[:, None] * (IN_FEATURES // 2) + pair, pair < end // 2, MASKED)
        codes = tl.join((both & 15).to(DTYPE), (both >> 4).to(DTYPE)).reshape(row.shape[0], INPUTS)
    else:  # every second group begins within a byte
        element = first + tl.arange(0, INPUTS)[None, :]
        place = weight + row[:, None] * (IN_FEATURES // 2) + element // 2
        shifted = loaded(place, element < end, MASKED) >> (element % 2 * 4).to(tl.uint8)
        codes = (shifted & 15).to(DTYPE)
    return codes


@triton.jit
def loaded(place, there, MASKED: tl.constexpr):
    """Return the numbers at ``place``, zeros where they are not ``there`` if some are not."""
    return tl.load(place, mask=there, other=0) if MASKED else tl.load(place)
