# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernel for the gated delta rule: a sequential scan over tokens.

Each program holds some columns of one head's state; the columns of a value are independent.

T tokens, H key heads, V value heads, K key size, D value size, B sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP16, FP32, INT64, Build, dtype_name, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device


@triton_kernel("gated_delta_rule")
def gated_delta_rule_triton(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor,
    query_starts: Tensor, slots: Tensor, num_cached: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Compute ``gated_delta_rule`` in Triton by a scan over the tokens of each sequence."""
    _, value_heads, value_size = value.shape
    heads, key_size = key.shape[1:]
    y = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if y.numel() == 0:
        return y
    keys, columns, compiled = _tile(value.device, key_size, value_size)
    _apply[(triton.cdiv(value_size, columns), value_heads, len(slots))](
        query, key, value, decay, beta, states, query_starts, slots, num_cached, y, float(scale),
        query.stride(0), key.stride(0), value.stride(0), decay.stride(0), beta.stride(0),
        states.stride(0),
        HEADS=value_heads, GROUPED=value_heads // heads, KEY_SIZE=key_size, VALUE_SIZE=value_size,
        KEYS=keys, COLUMNS=columns, **compiled,
    )  # fmt: skip
    return y


@per_device
def _tile(device: torch.device, key_size: int, value_size: int) -> tuple[int, int, dict[str, int]]:
    """Return the rows and columns of a state per program, and the launch options.

    Blocks in the tuning file: ``columns``, the maximum of columns; ``elements``, the maximum of
    elements per program, exceeded only if one column is longer.
    """
    parameters = parameters_for("gated_delta_rule", device)
    keys = triton.next_power_of_2(key_size)
    max_columns = max(1, parameters.blocks["elements"] // keys)
    columns = min(parameters.blocks["columns"], max_columns, triton.next_power_of_2(value_size))
    return keys, columns, parameters.compiled


@triton.jit
def _apply(
    query, key, value, decay, beta, states, query_starts, slots, num_cached, y, scale,
    query_stride, key_stride, value_stride, decay_stride, beta_stride, state_stride,
    HEADS: tl.constexpr, GROUPED: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    row = tl.arange(0, KEYS)
    first = tl.load(query_starts + sequence)
    last = tl.load(query_starts + sequence + 1)
    slot = tl.load(slots + sequence)
    # Without cached tokens the row of the pool may hold anything: start from zeros.
    has_state = (slot >= 0) & (tl.load(num_cached + sequence) > 0)
    key_mask, value_mask = row < KEY_SIZE, column < VALUE_SIZE
    inside = key_mask[:, None] & value_mask[None, :]
    element = (head * KEY_SIZE + row)[:, None] * VALUE_SIZE + column[None, :]
    state_pointer = states + slot * state_stride + element
    state = tl.load(state_pointer, mask=inside & has_state, other=0.0)
    # Several value heads share one query and key head.
    source = head // GROUPED * KEY_SIZE + row
    for token in range(first, last):
        k = tl.load(key + token * key_stride + source, mask=key_mask, other=0.0).to(tl.float32)
        q = tl.load(query + token * query_stride + source, mask=key_mask, other=0.0).to(tl.float32)
        v_pointer = value + token * value_stride + head * VALUE_SIZE + column
        v = tl.load(v_pointer, mask=value_mask, other=0.0).to(tl.float32)
        state *= tl.exp(tl.load(decay + token * decay_stride + head))
        update = v - tl.sum(state * k[:, None], axis=0)
        update *= tl.load(beta + token * beta_stride + head)
        state += k[:, None] * update[None, :]
        result = scale * tl.sum(state * q[:, None], axis=0)
        result = tl.where(slot >= 0, result, 0.0)
        target = y + (token * HEADS + head) * VALUE_SIZE + column
        tl.store(target, result.to(y.dtype.element_ty), mask=value_mask)
    # A sequence without tokens in this step must keep its state.
    tl.store(state_pointer, state, mask=inside & (slot >= 0) & (last > first))


def _build(label: str, heads: int, value_heads: int, size: int, dtype: torch.dtype = BF16) -> Build:
    keys, values = (dtype, 512, heads, size), (dtype, 512, value_heads, size)
    gates, pool = (FP32, 512, value_heads), (FP32, 64, value_heads, size, size)
    indices = (INT64, 33), (INT64, 32), (INT64, 32)
    arguments = given(keys, keys, values, gates, gates, pool, *indices, size**-0.5)
    return Build("gated_delta_rule_triton", label, arguments, dtype_name(dtype))


BUILDS = (
    _build("16 and 32 heads of 128", 16, 32, 128),
    _build("8 heads of 64", 8, 8, 64),
    _build("float16, 16 and 32 heads of 128", 16, 32, 128, FP16),
    _build("float32, 16 and 32 heads of 128", 16, 32, 128, FP32),
)
