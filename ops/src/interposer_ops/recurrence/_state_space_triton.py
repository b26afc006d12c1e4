# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernel for the state space scan: a sequential scan over tokens.

Each program holds some rows of one head's state.

T tokens, N heads, P head size, G groups, S state size, B sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP16, FP32, INT64, Build, dtype_name, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device


@triton_kernel("state_space_scan")
def state_space_scan_triton(
    x: Tensor, steps: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor | None,
    states: Tensor, query_starts: Tensor, slots: Tensor, num_cached: Tensor,
) -> Tensor:  # fmt: skip
    """Compute ``state_space_scan`` in Triton by a scan over the tokens of each sequence."""
    _, heads, size = x.shape
    groups, state = b.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows, columns, compiled = _tile(x.device, size, state)
    _scan[(triton.cdiv(size, rows), heads, len(slots))](
        x, steps, decay, b, c, skip, states, query_starts, slots, num_cached, y, x.stride(0),
        steps.stride(0), b.stride(0), c.stride(0), states.stride(0),
        HEADS=heads, GROUPED=heads // groups, SIZE=size, STATE=state, ROWS=rows, COLUMNS=columns,
        **compiled,
    )  # fmt: skip
    return y


@per_device
def _tile(device: torch.device, size: int, state: int) -> tuple[int, int, dict[str, int]]:
    """Return the rows and columns of a state per program, and the launch options.

    Blocks in the tuning file: ``rows``, the maximum of rows; ``elements``, the maximum of elements
    per program, exceeded only if one row is longer.
    """
    parameters = parameters_for("state_space_scan", device)
    columns = triton.next_power_of_2(state)
    max_rows = max(1, parameters.blocks["elements"] // columns)
    rows = min(parameters.blocks["rows"], max_rows, triton.next_power_of_2(size))
    return rows, columns, parameters.compiled


@triton.jit
def _scan(
    x, steps, decay, b, c, skip, states, query_starts, slots, num_cached, y, x_stride, step_stride,
    b_stride, c_stride, state_stride,
    HEADS: tl.constexpr, GROUPED: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    column = tl.arange(0, COLUMNS)
    first = tl.load(query_starts + sequence)
    last = tl.load(query_starts + sequence + 1)
    slot = tl.load(slots + sequence)
    # Without cached tokens the row of the pool may hold anything: start from zeros.
    has_state = (slot >= 0) & (tl.load(num_cached + sequence) > 0)
    row_mask, column_mask = row < SIZE, column < STATE
    inside = row_mask[:, None] & column_mask[None, :]
    state_pointer = (
        states + slot * state_stride + (head * SIZE + row)[:, None] * STATE + column[None, :]
    )
    state = tl.load(state_pointer, mask=inside & has_state, other=0.0)
    rate = tl.load(decay + head)
    for token in range(first, last):
        inputs = tl.load(x + token * x_stride + head * SIZE + row, mask=row_mask, other=0.0)
        inputs = inputs.to(tl.float32)
        step = tl.load(steps + token * step_stride + head)
        # Several heads share one group of keys and queries.
        group = head // GROUPED * STATE + column
        key = tl.load(b + token * b_stride + group, mask=column_mask, other=0.0).to(tl.float32)
        query = tl.load(c + token * c_stride + group, mask=column_mask, other=0.0).to(tl.float32)
        state = tl.exp(step * rate) * state + (step * inputs)[:, None] * key[None, :]
        result = tl.sum(state * query[None, :], axis=1)
        if skip is not None:
            result += tl.load(skip + head) * inputs
        result = tl.where(slot >= 0, result, 0.0)
        target = y + (token * HEADS + head) * SIZE + row
        tl.store(target, result.to(y.dtype.element_ty), mask=row_mask)
    # A sequence without tokens in this step must keep its state.
    tl.store(state_pointer, state, mask=inside & (slot >= 0) & (last > first))


def _build(
    label: str, heads: int, state: int, skipped: bool, dtype: torch.dtype = BF16, groups: int = 1
) -> Build:
    x, step, keys = (dtype, 512, heads, 64), (FP32, 512, heads), (dtype, 512, groups, state)
    per_head, pool = (FP32, heads), (FP32, 64, heads, 64, state)
    indices = (INT64, 33), (INT64, 32), (INT64, 32)
    skip = per_head if skipped else None
    arguments = given(x, step, per_head, keys, keys, skip, pool, *indices)
    return Build("state_space_scan_triton", label, arguments, dtype_name(dtype))


BUILDS = (
    _build("64 heads, state size 128", 64, 128, True),
    _build("a group for each of 32 heads without a skip", 32, 64, False, groups=32),
    _build("float16, state size 128", 64, 128, True, FP16),
    _build("float32, state size 128", 64, 128, True, FP32),
)
