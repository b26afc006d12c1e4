# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Split-K linear layers for few rows.

With few rows one row of tiles covers all outputs and leaves most of a GPU idle. So each program
sums over one part of the inputs, and a second launch adds the parts in a fixed order: the same call
always gives the same bits. The split depends on the sizes of the weight, not on the number of rows.
More than ``MOST_SPLIT_ROWS`` rows go to a kernel without split-K.

T tokens, I input features, O output features, P parts of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from interposer import Dims
from interposer_ops._triton.availability import MOST_SPLIT_ROWS
from interposer_ops._triton.build import (
    BF16,
    E4M3,
    E4M3_FNUZ,
    FP16,
    FP32,
    Build,
    all_but,
    dtype_name,
    given,
)
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.float8_operands import operands
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops._triton.rows import as_rows
from interposer_ops.quantized_linear import _scaled_linear_triton as scaled_linear
from interposer_ops.quantized_linear._linear_tiles_triton import (
    add_matmul,
    allocate_parts,
    load_tiles,
    reduce_parts,
    store_tile,
)


@triton_kernel(
    "linear",
    technique="split",
    dtypes=("bfloat16", "float16"),
    judge="judge_split",
    batch_invariant=False,
)
def linear_split(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear`` by split-K; more than ``MOST_SPLIT_ROWS`` rows by torch's ``linear``."""
    out_features = weight.shape[0]
    if not 0 < x.numel() // max(x.shape[-1], 1) <= MOST_SPLIT_ROWS or not out_features:
        return functional.linear(x, weight, bias)
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    tile = _tile("linear_split", x.device)
    _launch(tile, x, weight, None, None, bias, y, "plain", "plain")
    return y


@triton_kernel(
    "fp8_linear", technique="split", judge="judge_split", score=10.5, batch_invariant=False
)
def fp8_linear_split(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``fp8_linear`` by split-K; more than ``MOST_SPLIT_ROWS`` by ``fp8_linear_triton``.

    The scales are applied once, to the sum of the parts.
    """
    out_features = weight.shape[0]
    if not 0 < x.numel() // max(x.shape[-1], 1) <= MOST_SPLIT_ROWS or not out_features:
        return scaled_linear.fp8_linear_triton(x, weight, x_scale, weight_scale, bias, out_dtype)
    y = torch.empty((*x.shape[:-1], out_features), dtype=out_dtype, device=x.device)
    tile = _tile("fp8_linear_split", x.device)
    formats = operands(x.device, x.dtype, weight.dtype, tile.operand_bits)
    if formats.is_decoded:
        x, weight = x.view(torch.int8), weight.view(torch.int8)
    _launch(tile, x, weight, x_scale, weight_scale, bias, y, formats.x, formats.weight)
    return y


class _Tile(NamedTuple):
    """Tile sizes of one program and launch options; the fields are named in the tuning files.

    Attributes:
        outputs: columns of the result per program.
        inputs: input features per loop step.
        least: minimum input features of a part, since each part is written and read again.
        programs: approximate number of programs that occupy the device.
        compiled: launch options of triton.
        operand_bits: see ``LinearTile``.
    """

    outputs: int
    inputs: int
    least: int
    programs: int
    compiled: Mapping[str, int]
    operand_bits: int = 16

    def split(self, in_features: int, out_features: int) -> tuple[int, int]:
        """Return the number of parts and the inputs per part, a multiple of ``inputs``."""
        tiles = -(-out_features // self.outputs)
        max_parts = max(1, min(self.programs // tiles, in_features // self.least))
        steps = -(-in_features // self.inputs)
        part_steps = -(-steps // max_parts)
        return -(-steps // part_steps), part_steps * self.inputs


@per_device
def _tile(kernel: str, device: torch.device) -> _Tile:
    parameters = parameters_for(kernel, device)
    return _Tile(**parameters.blocks, compiled=parameters.compiled)


def _launch(
    tile: _Tile, x: Tensor, weight: Tensor, x_scale: Tensor | None,
    weight_scale: Tensor | None, bias: Tensor | None, y: Tensor, x_format: str,
    weight_format: str,
) -> None:  # fmt: skip
    """Compute ``y`` by one launch, or by two if the sum has several parts."""
    rows = as_rows(x)
    num_rows, (out_features, in_features) = rows.shape[0], weight.shape
    num_parts, part_inputs = tile.split(in_features, out_features)
    parts = allocate_parts(num_parts, num_rows, y)
    # Stride 0 makes every row or output read the one scale of the tensor.
    x_scale_stride = 0 if x_scale is None or x_scale.numel() == 1 else 1
    weight_scale_stride = 0 if weight_scale is None or weight_scale.numel() == 1 else 1
    _part_of_sum[(-(-out_features // tile.outputs), num_parts)](
        rows, weight, x_scale, weight_scale, bias, y if parts is None else parts, num_rows,
        rows.stride(0), x_scale_stride, weight_scale_stride,
        INPUTS=in_features, OUTPUTS=out_features, PARTS=num_parts, PART_INPUTS=part_inputs,
        ROW_TILE=MOST_SPLIT_ROWS, OUTPUT_TILE=tile.outputs, STEP=tile.inputs, X_FORMAT=x_format,
        WEIGHT_FORMAT=weight_format, **tile.compiled,
    )  # fmt: skip
    if parts is not None:
        reduce_parts(parts, y, bias, x_scale, weight_scale, x_scale_stride, weight_scale_stride)


# Without this, triton compiles again for row counts and strides of 1 and of multiples of 16.
@triton.jit(do_not_specialize=["num_rows", "x_scale_stride", "weight_scale_stride"])
def _part_of_sum(
    x, weight, x_scale, weight_scale, bias, target, num_rows, x_stride, x_scale_stride,
    weight_scale_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, PART_INPUTS: tl.constexpr,
    ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr, STEP: tl.constexpr, X_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    row = tl.arange(0, ROW_TILE)
    output = tl.program_id(0) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    # Rows and outputs past the end read row or output 0 instead and are not stored.
    safe_row = tl.where(row < num_rows, row, 0).to(tl.int64)
    safe_output = tl.where(output < OUTPUTS, output, 0)
    column = part * PART_INPUTS + tl.arange(0, STEP)
    x += safe_row[:, None] * x_stride + column[None, :]
    weight += safe_output[None, :].to(tl.int64) * INPUTS + column[:, None]
    total = tl.zeros([ROW_TILE, OUTPUT_TILE], tl.float32)
    for start in range(0, PART_INPUTS, STEP):
        a, b = load_tiles(x, weight, start, column, INPUTS, PARTS * PART_INPUTS == INPUTS)
        total = add_matmul(a, b, total, STEP, X_FORMAT, WEIGHT_FORMAT)
    if PARTS == 1:
        if x_scale is not None:
            total *= tl.load(x_scale + safe_row * x_scale_stride)[:, None]
            total *= tl.load(weight_scale + safe_output * weight_scale_stride)[None, :]
        store_tile(total, bias, target, row, output, safe_output, num_rows, OUTPUTS)
    else:
        target += part.to(tl.int64) * num_rows * OUTPUTS
        store_tile(total, None, target, row, output, safe_output, num_rows, OUTPUTS)


_WITHOUT_SPLIT = all_but("gfx90a", "gfx942", "gfx950")


def _plain(
    label: str, rows: int, inputs: int, outputs: int, dtype: torch.dtype = BF16, bias: bool = False
) -> Build:
    offset = (dtype, outputs) if bias else None
    arguments = given((dtype, rows, inputs), (dtype, outputs, inputs), offset)
    dims: Dims = {"in_features": inputs, "out_features": outputs}
    return Build("linear_split", label, arguments, dtype_name(dtype), dims, True, _WITHOUT_SPLIT)


def _fp8(
    label: str, rows: int, outputs: int, dtype: torch.dtype = E4M3, scales_per_row: bool = True,
    without: frozenset[str] = _WITHOUT_SPLIT,
) -> Build:  # fmt: skip
    scales = ((FP32, rows, 1), (FP32, outputs)) if scales_per_row else ((FP32, 1), (FP32, 1))
    arguments = given((dtype, rows, 4096), (dtype, outputs, 4096), *scales, None, BF16)
    dims: Dims = {
        "in_features": 4096,
        "out_features": outputs,
        "x_dtype": dtype_name(dtype),
        "weight_dtype": dtype_name(dtype),
    }
    return Build("fp8_linear_split", label, arguments, "bfloat16", dims, True, without)


_FNUZ_LABEL = "1 token, 4096 to 4096, float8_e4m3fnuz"
BUILDS = (
    _plain("1 token, 4096 to 4096", 1, 4096, 4096),
    _plain("16 tokens, 14336 to 4096, bias", 16, 14336, 4096, bias=True),
    _plain("16 tokens, 4096 to 128256, one part", 16, 4096, 128256),
    _plain("float16, 4 tokens, 2880 to 1000, padded", 4, 2880, 1000, FP16),
    _fp8("1 token, 4096 to 4096", 1, 4096),
    _fp8("16 tokens, 4096 to 14336, scales per tensor", 16, 14336, scales_per_row=False),
    _fp8(_FNUZ_LABEL, 1, 4096, E4M3_FNUZ, without=all_but("gfx942")),
)
