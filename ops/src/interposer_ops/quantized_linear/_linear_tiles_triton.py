# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Tile sizes, loads, stores and split-K of the Triton linear kernels.

T rows, I input features, O output features, P parts of a split sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.availability import MOST_SPLIT_ROWS
from interposer_ops._triton.float8_operands import decode
from interposer_ops._triton.parameters import Parameters, parameters_for, per_device

STEPS = tuple(
    (f"{tokens} tokens, 4096 to {outputs}", tokens, outputs)
    for tokens, outputs in ((1, 4096), (64, 14336), (4096, 14336))
)
"""Build sizes of an 8B model: decoding 1 sequence, decoding 64 sequences, and a prefill."""


# Minimum loop steps of a part: shorter parts cost more to write and read than to compute.
_MIN_PART_STEPS = 4


class LinearTile(NamedTuple):
    """Tile sizes of one program and launch options; the fields are named in the tuning files.

    Attributes:
        rows: rows of the result per program.
        outputs: columns of the result per program.
        inputs: input features per loop step.
        group: number of row tiles that consecutive programs compute for the same columns, while the
            weight tile is in the L2 cache.
        compiled: launch options of triton.
        operand_bits: minimum bits of matrix instruction operands: 16 where the instructions for
            8-bit floats accumulate in less than float32.
        most: maximum rows for a ``<kernel>_few`` tile.
    """

    rows: int
    outputs: int
    inputs: int
    group: int
    compiled: Mapping[str, int]
    operand_bits: int = 8
    most: int = 0

    def num_programs(self, num_rows: int, out_features: int) -> int:
        """Return the number of tiles of the result."""
        return -(-num_rows // self.rows) * -(-out_features // self.outputs)

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch: tile sizes, and the options of triton."""
        sizes = {"ROW_TILE": self.rows, "OUTPUT_TILE": self.outputs, "STEP": self.inputs}
        return {**sizes, "GROUP": self.group, **self.compiled}


class FeatureTile(NamedTuple):
    """Tile sizes of one program for kernels that compute the transposed result.

    Attributes:
        features: output features per program.
        tokens: tokens per program.
        inputs: input features per loop step.
        compiled: launch options of triton.
        programs: approximate number of programs that occupy the device, reached by split-K; 1
            disables split-K.
    """

    features: int
    tokens: int
    inputs: int
    compiled: Mapping[str, int]
    programs: int = 1

    def split(self, num_tokens: int, out_features: int, num_steps: int) -> tuple[int, int]:
        """Return the number of split-K parts of ``num_steps`` loop steps and the steps per part."""
        tiles = -(-num_tokens // self.tokens) * -(-out_features // self.features)
        max_parts = max(1, min(self.programs // tiles, num_steps // _MIN_PART_STEPS))
        part_steps = -(-num_steps // max_parts)
        return -(-num_steps // part_steps), part_steps

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch: tile sizes, and the options of triton."""
        sizes = {"FEATURES": self.features, "TOKENS": self.tokens, "INPUTS": self.inputs}
        return {**sizes, **self.compiled}


def parameters_by_tokens(kernel: str, device: torch.device, num_tokens: int) -> Parameters:
    """Return the parameters of ``kernel``_few, ``kernel``_some or ``kernel`` by number of tokens.

    ``kernel``_few is for up to 16 tokens, ``kernel``_some for up to the ``tokens`` in its file.
    """
    if num_tokens <= MOST_SPLIT_ROWS:
        return parameters_for(f"{kernel}_few", device)
    some = parameters_for(f"{kernel}_some", device)
    return some if num_tokens <= some.blocks["tokens"] else parameters_for(kernel, device)


def linear_tile(kernel: str, device: torch.device, num_rows: int) -> LinearTile:
    """Return the tile of ``kernel``, or of ``kernel``_few if there are few enough rows."""
    small_tile = _tile(f"{kernel}_few", device)
    return small_tile if num_rows <= small_tile.most else _tile(kernel, device)


@per_device
def _tile(kernel: str, device: torch.device) -> LinearTile:
    parameters = parameters_for(kernel, device)
    return LinearTile(**parameters.blocks, compiled=parameters.compiled)


_REDUCE_WIDTH = 1024  # outputs per program of the split-K reduction


def allocate_parts(num_parts: int, num_tokens: int, y: Tensor) -> Tensor | None:
    """Allocate the parts of a split-K ``y``, ``[P, T, O]`` in float32; None for one part."""
    if num_parts == 1:
        return None
    shape = (num_parts, num_tokens, y.shape[-1])
    return torch.empty(shape, dtype=torch.float32, device=y.device)


def reduce_parts(
    parts: Tensor, y: Tensor, bias: Tensor | None, x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None, x_scale_stride: int = 0, weight_scale_stride: int = 0,
) -> None:  # fmt: skip
    """Add the parts of a split-K sum in order, scale the sum, add the bias and store ``y``.

    Args:
        parts: ``[P, T, O]``, float32.
        y: ``[..., O]`` of T rows.
        bias: ``[O]``.
        x_scale: factors of rows; one factor if ``x_scale_stride`` is 0.
        weight_scale: factors of outputs; one factor if ``weight_scale_stride`` is 0.
    """
    num_parts, num_rows, out_features = parts.shape
    width = min(_REDUCE_WIDTH, triton.next_power_of_2(out_features))
    _reduce_parts[(num_rows, -(-out_features // width))](
        parts, x_scale, weight_scale, bias, y, num_rows, x_scale_stride, weight_scale_stride,
        OUTPUTS=out_features, PARTS=num_parts, WIDTH=width, num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "x_scale_stride", "weight_scale_stride"])
def _reduce_parts(
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
def tile_position(
    num_rows,
    OUTPUTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the row numbers (int64) and the output numbers of this program's tile.

    Numbers may exceed ``num_rows`` and ``OUTPUTS`` in the last tiles.
    """
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROW_TILE)
    output_tiles: tl.constexpr = (OUTPUTS + OUTPUT_TILE - 1) // OUTPUT_TILE
    # Programs are numbered down GROUP row tiles, then across the outputs, then in the next group.
    first_tile = program // (GROUP * output_tiles) * GROUP
    group_height = tl.minimum(row_tiles - first_tile, GROUP)
    number = program % (GROUP * output_tiles)
    row = (first_tile + number % group_height).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    output = number // group_height * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    return row, output


@triton.jit
def load_tiles(x, weight, start, column, INPUTS: tl.constexpr, FULL_STEPS: tl.constexpr):
    """Load the tiles of both operands at input ``start``, with zeros past the last input."""
    if FULL_STEPS:
        a = tl.load(x + start)
        b = tl.load(weight + start)
    else:
        inside = start + column < INPUTS
        a = tl.load(x + start, mask=inside[None, :], other=0.0)
        b = tl.load(weight + start, mask=inside[:, None], other=0.0)
    return a, b


@triton.jit
def add_matmul(
    a, b, total, STEP: tl.constexpr, X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr
):  # fmt: skip
    """Return ``total + a @ b``; a format is "plain" or one of ``Operands``."""
    if X_FORMAT == "plain":
        total = tl.dot(a, b, total)
    elif X_FORMAT == "stored":
        # Hopper's instruction accumulates in less than float32; promote its sum after every step.
        total = tl.dot(a, b, total, max_num_imprecise_acc=STEP)
    else:
        total = tl.dot(decode(a, X_FORMAT), decode(b, WEIGHT_FORMAT), total)
    return total


@triton.jit
def store_tile(result, bias, y, row, output, safe_output, num_rows, OUTPUTS: tl.constexpr):
    """Add the bias and store the existing rows and outputs in the dtype of ``y``."""
    if bias is not None:
        result += tl.load(bias + safe_output).to(tl.float32)[None, :]
    target = y + row[:, None] * OUTPUTS + output[None, :]
    inside = (row < num_rows)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(target, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def load_nibbles(
    weight, row, first, end,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, MASKED: tl.constexpr,
    INPUTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load the 4-bit values of ``INPUTS`` inputs from ``first`` on; undefined from ``end`` on."""
    if GROUP_SIZE % 2 == 0:
        pair = first // 2 + tl.arange(0, INPUTS // 2)[None, :]
        bytes_of_two = load_masked(
            weight + row[:, None] * (IN_FEATURES // 2) + pair, pair < end // 2, MASKED
        )
        quantized = tl.join((bytes_of_two & 15).to(DTYPE), (bytes_of_two >> 4).to(DTYPE))
        quantized = quantized.reshape(row.shape[0], INPUTS)
    else:  # every second group starts in the high nibble of a byte
        element = first + tl.arange(0, INPUTS)[None, :]
        pointer = weight + row[:, None] * (IN_FEATURES // 2) + element // 2
        shifted = load_masked(pointer, element < end, MASKED) >> (element % 2 * 4).to(tl.uint8)
        quantized = (shifted & 15).to(DTYPE)
    return quantized


@triton.jit
def load_masked(pointer, mask, MASKED: tl.constexpr):
    """Load a tile from ``pointer``, with zeros where ``mask`` is False if ``MASKED`` is set."""
    return tl.load(pointer, mask=mask, other=0) if MASKED else tl.load(pointer)
