# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Experts of MoE layers, in Triton.

T tokens, H hidden size, E experts, I intermediate size, K chosen experts.

Five launches: two sort the slots by expert into a number of blocks that depends on shapes only, so
that the host never waits; one multiplies by the first matrices and applies the activation; one
multiplies by the second matrices; one sums the K results of each token in order. The tile does not
depend on the number of tokens, and the result of a row does not depend on its neighbours in the
tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer import Dim, Dims
from interposer.errors import RequestError
from interposer_ops._triton.build import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT32,
    UINT8,
    Build,
    dtype_name,
    given,
)
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import Parameters, parameters_for
from interposer_ops._triton.rows import as_rows
from interposer_ops.experts._expert_permutation_triton import aligned_blocks, sum_of_slots
from interposer_ops.experts._expert_tiles_triton import (
    activated,
    apply_scale,
    expert_tile,
    kernel_weights,
    load_weights,
)

_ACTIVATIONS = ("silu", "gelu", "swiglu_oai")


@triton_kernel("fused_experts")
def fused_experts_triton(
    x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, weights: Tensor, expert_ids: Tensor,
    activation: str,
) -> Tensor:  # fmt: skip
    """Compute ``fused_experts`` in Triton: one grouped GEMM per projection."""
    first = _Matrices(gate_up, None, gate_up_bias)
    second = _Matrices(down, None, down_bias)
    return _run_experts("fused_experts", x, first, second, weights, expert_ids, activation)


@triton_kernel("fused_experts_fp8")
def fused_experts_fp8_triton(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor,
    down_scale: Tensor, weights: Tensor, expert_ids: Tensor, activation: str,
) -> Tensor:  # fmt: skip
    """Compute ``fused_experts_fp8``; every dtype of ``x`` represents 8-bit floats exactly."""
    first, second = _Matrices(gate_up, gate_up_scale, None), _Matrices(down, down_scale, None)
    return _run_experts("fused_experts_fp8", x, first, second, weights, expert_ids, activation)


@triton_kernel("fused_experts_w4a16", dims={"group_size": Dim(multiple_of=2)})
def fused_experts_w4a16_triton(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor,
    down_scale: Tensor, weights: Tensor, expert_ids: Tensor, activation: str,
) -> Tensor:  # fmt: skip
    """Compute ``fused_experts_w4a16``: multiply integers, then scale the sum of each group."""
    first, second = _Matrices(gate_up, gate_up_scale, None), _Matrices(down, down_scale, None)
    return _run_experts("fused_experts_w4a16", x, first, second, weights, expert_ids, activation)


@triton_kernel("fused_experts_mxfp4")
def fused_experts_mxfp4_triton(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor,
    gate_up_bias: Tensor | None, down: Tensor, down_scale: Tensor,
    down_bias: Tensor | None, weights: Tensor, expert_ids: Tensor,
    activation: str,
) -> Tensor:  # fmt: skip
    """Compute ``fused_experts_mxfp4``: multiply FP4 values, then scale the sum of each block."""
    first = _Matrices(gate_up, gate_up_scale, gate_up_bias)
    second = _Matrices(down, down_scale, down_bias)
    return _run_experts("fused_experts_mxfp4", x, first, second, weights, expert_ids, activation)


class _Matrices(NamedTuple):
    """Stored weights, scales and biases of one projection of all experts.

    Attributes:
        stored: ``[E, outputs, inputs]``, or half as many bytes if two values share a byte.
        scale: ``[E, R, C]``, each for an equal part of the rows and columns; uint8 means exponents.
        bias: ``[E, outputs]``.
    """

    stored: Tensor
    scale: Tensor | None
    bias: Tensor | None


class _Blocks(NamedTuple):
    """The slots sorted by expert, from ``aligned_blocks``."""

    slots: Tensor
    experts: Tensor
    num_slots: int


def _run_experts(
    kernel: str, x: Tensor, first: _Matrices, second: _Matrices, weights: Tensor,
    expert_ids: Tensor, activation: str,
) -> Tensor:  # fmt: skip
    if activation not in _ACTIVATIONS:
        alternatives = " or ".join(map(repr, _ACTIVATIONS))
        raise RequestError(f"No activation {activation!r} of experts; try {alternatives}")
    top_k = expert_ids.shape[1]
    num_experts, outputs = second.stored.shape[:2]
    inner = first.stored.shape[1] // 2
    if expert_ids.numel() == 0 or outputs == 0:
        return torch.zeros((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    parameters = parameters_for(kernel, x.device)
    slots, experts = aligned_blocks(expert_ids, num_experts, parameters.blocks["rows"])
    blocks = _Blocks(slots, experts, expert_ids.numel())
    columns = parameters.blocks["column_bytes"] // x.element_size()
    hidden = torch.empty((blocks.num_slots, inner), dtype=x.dtype, device=x.device)
    _project(as_rows(x), first, blocks, hidden, parameters, columns, top_k, activation)
    # float32, since the op rounds only after the weighted sum.
    results = torch.empty((blocks.num_slots, outputs), dtype=torch.float32, device=x.device)
    # The first projection accumulates gate and up tiles; here one accumulator can be twice as wide.
    _project(hidden, second, blocks, results, parameters, 2 * columns, 1, "")
    return sum_of_slots(results, expert_ids, weights, x.dtype)


def _project(
    x: Tensor, matrices: _Matrices, blocks: _Blocks, y: Tensor, parameters: Parameters,
    columns: int, slots_per_row: int, activation: str,
) -> None:  # fmt: skip
    """Compute one projection for all slots into ``y``.

    Args:
        columns: columns of ``y`` per tile.
        slots_per_row: number of consecutive slots with the same row of ``x``.
        activation: applied to the two halves of the outputs; empty: store all outputs.
    """
    _, scale, bias = matrices
    stored, form = kernel_weights(matrices.stored, scale)
    width, depth = y.shape[1], x.shape[1]
    scale_rows, groups = (1, 1) if scale is None else scale.shape[1:]
    group = depth // groups
    # A step never spans two groups, since each group's sum is multiplied by its own scale.
    step = parameters.blocks["depth_bytes"] // x.element_size()
    step = max(16, min(step, triton.next_power_of_2(group)))
    num_tiles = triton.cdiv(width, columns)
    num_blocks = blocks.experts.numel()
    _multiply[(num_blocks * num_tiles,)](
        x, stored, scale, bias, y, blocks.slots, blocks.experts, num_blocks, blocks.num_slots,
        x.stride(0),
        ACTIVATION=activation, FORM=form, SHARE=slots_per_row, WIDTH=width, OUTPUTS=stored.shape[1],
        DEPTH=depth, SCALE_ROWS=scale_rows, GROUPS=groups, GROUP=group,
        ROWS=parameters.blocks["rows"], COLUMNS=columns, STEP=step, STEPS=triton.cdiv(group, step),
        BAND=parameters.blocks["band"], **parameters.compiled,
    )  # fmt: skip


@triton.jit
def _multiply(
    x, stored, scale, bias, y, slots, experts, num_blocks, num_slots, x_stride,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    STEPS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    block, tile = expert_tile(num_blocks, (WIDTH + COLUMNS - 1) // COLUMNS, BAND)
    expert = tl.load(experts + block).to(tl.int64)
    if expert < 0:
        return  # the number of blocks is an upper bound
    slot = tl.load(slots + block * ROWS + tl.arange(0, ROWS))
    slot_mask = (slot < num_slots)[:, None]
    slot = slot.to(tl.int64)[:, None]
    x += slot // SHARE * x_stride
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < WIDTH
    # Two values to a byte of integers or codes.
    PACKED: tl.constexpr = 2 if FORM == "int4" or FORM == "e2m1" else 1
    row = stored + expert * (OUTPUTS * (DEPTH // PACKED)) + column[:, None] * (DEPTH // PACKED)
    if scale is not None:
        scale += expert * (SCALE_ROWS * GROUPS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in range(GROUPS * STEPS):
        # One flat loop over the steps of all groups, as Triton pipelines only innermost loops.
        if GROUPS == 1:
            group = 0
            start = number * STEP
        else:
            group = number // STEPS
            start = number % STEPS * STEP
        inner = start + tl.arange(0, STEP)[None, :]
        load_mask = slot_mask if GROUP % STEP == 0 else slot_mask & (inner < GROUP)
        value = tl.load(x + group * GROUP + inner, mask=load_mask, other=0.0)
        weight = load_weights(
            row, column_mask[:, None], group * GROUP, start, value.dtype, FORM, GROUP, STEP
        )
        if ACTIVATION != "":
            up_weight = load_weights(
                row + WIDTH * (DEPTH // PACKED),
                column_mask[:, None],
                group * GROUP,
                start,
                value.dtype,
                FORM,
                GROUP,
                STEP,
            )
        if GROUPS == 1:
            total = tl.dot(value, tl.trans(weight), total, input_precision="ieee")
            if ACTIVATION != "":
                up = tl.dot(value, tl.trans(up_weight), up, input_precision="ieee")
        else:
            part = tl.dot(value, tl.trans(weight), input_precision="ieee")
            total += apply_scale(
                part, scale, column, column_mask, group, SCALE_ROWS, OUTPUTS, GROUPS
            )
            if ACTIVATION != "":
                part = tl.dot(value, tl.trans(up_weight), input_precision="ieee")
                up += apply_scale(
                    part, scale, WIDTH + column, column_mask, group, SCALE_ROWS, OUTPUTS, GROUPS
                )
    # With a single group, one multiplication after the loop replaces one per step.
    if GROUPS == 1 and scale is not None:
        total = apply_scale(total, scale, column, column_mask, 0, SCALE_ROWS, OUTPUTS, GROUPS)
        if ACTIVATION != "":
            up = apply_scale(up, scale, WIDTH + column, column_mask, 0, SCALE_ROWS, OUTPUTS, GROUPS)
    if bias is not None:
        bias += expert * OUTPUTS + column
        total += tl.load(bias, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            up += tl.load(bias + WIDTH, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        total = activated(total, up, ACTIVATION)
    target = y + slot * WIDTH + column[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=slot_mask & column_mask[None, :])


class _Model(NamedTuple):
    """Sizes of a model's experts."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int


_MIXTRAL, _GPT_OSS = _Model(8, 4096, 14336, 2), _Model(32, 2880, 2880, 4)
_DEEPSEEK = _Model(64, 2048, 1408, 6)
_FEW, _MANY = 64, 4096  # tokens of a decode step and of a prefill step


def _build(
    op: str, label: str, model: _Model, count: int, dtype: torch.dtype = BF16, *,
    stored: torch.dtype | None = None, scale: torch.dtype = FP32, block: tuple[int, int] = (1, 0),
    biased: bool | None = None, activation: str = "silu", dims: Dims | None = None,
) -> Build:  # fmt: skip
    """Describe an ahead-of-time build for the experts of one MoE layer.

    Args:
        stored: dtype of quantized weights (uint8: two values per byte); None: weights of ``dtype``.
        block: outputs and inputs per scale; 0 means all inputs.
        biased: None if the op has no bias arguments.
    """
    experts, hidden, inner, top_k = model
    bias: dict[bool | None, Any] = {None: (), False: (None,)}
    arguments: list[Any] = [(dtype, count, hidden)]
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        packing = 2 if stored == UINT8 else 1
        arguments.append((stored or dtype, experts, outputs, inputs // packing))
        if stored:
            columns = inputs // block[1] if block[1] else 1
            arguments.append((scale, experts, outputs // block[0], columns))
        arguments += bias.get(biased, ((dtype, experts, outputs),))
    arguments += [(FP32, count, top_k), (INT32, count, top_k), activation]
    return Build(
        f"{op}_triton", label, given(*arguments), dtype_name(dtype), dims or {},
        matrix=dtype != FP32,
    )  # fmt: skip


_plain = partial(_build, "fused_experts")
_fp8 = partial(_build, "fused_experts_fp8")
_w4 = partial(_build, "fused_experts_w4a16", stored=UINT8)
_mxfp4 = partial(
    _build, "fused_experts_mxfp4", stored=UINT8, scale=UINT8, block=(1, 32), biased=True,
    activation="swiglu_oai",
)  # fmt: skip
_GROUPS: dict[str, Any] = {"scale": BF16, "block": (1, 128), "dims": {"group_size": 128}}
_GROUPS_32: dict[str, Any] = {"scale": FP16, "block": (1, 32), "dims": {"group_size": 32}}
_BLOCKS: dict[str, Any] = {"block": (128, 128)}

BUILDS = (
    _plain("64 tokens, 8 of 4096 x 14336", _MIXTRAL, _FEW, biased=False),
    _plain("4096 tokens, 8 of 4096 x 14336", _MIXTRAL, _MANY, biased=False),
    _plain("64 tokens, 64 of 2048 x 1408", _DEEPSEEK, _FEW, biased=False),
    _plain("4096 tokens, 64 of 2048 x 1408", _DEEPSEEK, _MANY, biased=False),
    _plain(
        *("swiglu_oai with biases, 32 of 2880 x 2880", _GPT_OSS, _FEW),
        biased=True,
        activation="swiglu_oai",
    ),
    _plain(
        *("float16, gelu, 8 of 4096 x 14336", _MIXTRAL, _MANY, FP16),
        biased=False,
        activation="gelu",
    ),
    _plain("float32, 8 of 4096 x 14336", _MIXTRAL, _MANY, FP32, biased=False),
    _fp8(
        "float8_e4m3fn, 4096 tokens, 8 of 4096 x 14336, per channel", _MIXTRAL, _MANY, stored=E4M3
    ),
    _fp8(
        *("float8_e4m3fn, 64 tokens, 64 of 2048 x 1408, blocks of 128", _DEEPSEEK, _FEW),
        stored=E4M3,
        **_BLOCKS,
    ),
    _fp8(
        *("float8_e5m2, 4096 tokens, 64 of 2048 x 1408, blocks of 128", _DEEPSEEK, _MANY),
        stored=E5M2,
        **_BLOCKS,
    ),
    _w4("4096 tokens, 8 of 4096 x 14336, groups of 128", _MIXTRAL, _MANY, **_GROUPS),
    _w4("64 tokens, 64 of 2048 x 1408, groups of 128", _DEEPSEEK, _FEW, **_GROUPS),
    _w4("float16, 64 tokens, 64 of 2048 x 1408, groups of 32", _DEEPSEEK, _FEW, FP16, **_GROUPS_32),
    _mxfp4("64 tokens, 32 of 2880 x 2880", _GPT_OSS, _FEW),
    _mxfp4("4096 tokens, 32 of 2880 x 2880", _GPT_OSS, _MANY),
    _mxfp4("float16, 64 tokens, 32 of 2880 x 2880", _GPT_OSS, _FEW, FP16),
)
