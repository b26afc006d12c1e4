# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Logits that are scaled, capped, ruled out and favoured.

B sequences, V vocabulary, M listed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP32, INT32, INT64, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile


@triton_kernel("apply_penalties")
def apply_penalties_triton(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor,
    repetition: Tensor, presence: Tensor, frequency: Tensor,
) -> Tensor:  # fmt: skip
    """Compute ``apply_penalties``."""
    of_tokens, of_rows = (prompt_mask, output_counts), (repetition, presence, frequency)
    return each_logit(_penalties, logits, *of_tokens, *of_rows, dtype=torch.float32)


@triton_kernel("apply_temperature")
def apply_temperature_triton(logits: Tensor, temperature: Tensor) -> Tensor:
    """Compute ``apply_temperature``."""
    return each_logit(_tempered, logits, temperature, dtype=torch.float32)


@triton_kernel("apply_token_bitmask")
def apply_token_bitmask_triton(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Compute ``apply_token_bitmask``."""
    return each_logit(_allowed, logits, bitmask)


@triton_kernel("logits_softcap")
def logits_softcap_triton(logits: Tensor, cap: float) -> Tensor:
    """Compute ``logits_softcap``."""
    return each_logit(_capped, logits, float(cap), tuning="softcap")


def each_logit(
    kernel: Any,
    logits: Tensor,
    *operands: Tensor | float | None,
    dtype: torch.dtype | None = None,
    tuning: str = "logits",
) -> Tensor:
    """Return what ``kernel`` makes of every logit.

    It takes logits, operands, the result, the number of rows, the stride of the logits and of each
    operand that is a matrix.

    Args:
        dtype: of the result; that of the logits without.
        tuning: whose launch parameters are taken.
    """
    y = torch.empty(logits.shape, dtype=dtype or logits.dtype, device=logits.device)
    if y.numel() == 0:
        return y
    rows = as_rows(logits)
    others = [as_rows(x) if isinstance(x, Tensor) and x.ndim > 1 else x for x in operands]
    num_rows, vocab_size = rows.shape
    tile = row_tile(tuning, y.device, vocab_size)
    strides = [x.stride(0) for x in others if isinstance(x, Tensor) and x.ndim > 1]
    kernel[(tile.row_blocks(num_rows), tile.column_blocks(vocab_size))](
        rows, *others, y, num_rows, rows.stride(0), *strides, VOCAB_SIZE=vocab_size, **tile.options
    )
    return y


@triton_kernel("apply_logit_bias")
def apply_logit_bias_triton(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Compute ``apply_logit_bias``: a copy, of which the listed tokens are changed."""
    y = logits.clone(memory_format=torch.contiguous_format)
    _change_listed(y, token_ids, as_rows(values), None, None)
    return y


@triton_kernel("suppress_tokens_until")
def suppress_tokens_until_triton(
    logits: Tensor, steps: Tensor, min_tokens: Tensor, stop_ids: Tensor
) -> Tensor:
    """Compute ``suppress_tokens_until``: a copy, of which the listed tokens are changed."""
    y = logits.clone(memory_format=torch.contiguous_format)
    _change_listed(y, stop_ids, None, steps, min_tokens)
    return y


def _change_listed(
    y: Tensor, token_ids: Tensor, values: Tensor | None,
    steps: Tensor | None, min_tokens: Tensor | None,
) -> None:  # fmt: skip
    """Add ``values`` to the listed tokens, or rule them out where ``steps`` are too few."""
    if y.numel() == 0 or token_ids.numel() == 0:
        return
    listed = as_rows(token_ids)
    num_rows, length = listed.shape
    tile = row_tile("listed_tokens", y.device, length)
    _change[(tile.row_blocks(num_rows), tile.column_blocks(length))](
        y, listed, values, steps, min_tokens, num_rows, length, listed.stride(0),
        0 if values is None else values.stride(0),
        VOCAB_SIZE=y.shape[1], **tile.options,
    )  # fmt: skip


@triton.jit
def _penalties(
    logits, prompt_mask, output_counts, repetition, presence, frequency, y, num_rows, stride,
    mask_stride, counts_stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = row < num_rows
    inside = there & (column < VOCAB_SIZE)
    factor = tl.load(repetition + row, mask=there, other=1.0).to(tl.float32)
    once = tl.load(presence + row, mask=there, other=0.0).to(tl.float32)
    each = tl.load(frequency + row, mask=there, other=0.0).to(tl.float32)
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    prompted = tl.load(prompt_mask + row * mask_stride + column, mask=inside, other=0) != 0
    count = tl.load(output_counts + row * counts_stride + column, mask=inside, other=0)
    generated = count > 0
    divided = tl.div_rn(value, tl.zeros_like(value) + factor)
    repeated = tl.where(value > 0, divided, value * factor)
    value = tl.where(prompted | generated, repeated, value)
    value -= once * generated.to(tl.float32)
    value -= each * count.to(tl.float32)
    tl.store(y + row * VOCAB_SIZE + column, value, mask=inside)


@triton.jit
def _tempered(
    logits, temperature, y, num_rows, stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = row < num_rows
    inside = there & (column < VOCAB_SIZE)
    divisor = tl.load(temperature + row, mask=there, other=1.0).to(tl.float32)
    divisor = tl.where(divisor > 0, divisor, 1.0)
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.div_rn(value, tl.zeros_like(value) + divisor)
    tl.store(y + row * VOCAB_SIZE + column, value, mask=inside)


@triton.jit
def _allowed(
    logits, bitmask, y, num_rows, stride, mask_stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < VOCAB_SIZE)
    word = tl.load(bitmask + row * mask_stride + column // 32, mask=inside, other=0)
    is_allowed = ((word >> (column % 32)) & 1) != 0
    # What is ruled out need not be read.
    source = logits + row * stride + column
    value = tl.load(source, mask=inside & is_allowed, other=0.0).to(tl.float32)
    value = tl.where(is_allowed, value, float("-inf"))
    tl.store(y + row * VOCAB_SIZE + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _capped(
    logits, cap, y, num_rows, stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < VOCAB_SIZE)
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    result = cap * _tanh(tl.div_rn(x, tl.zeros_like(x) + cap))
    tl.store(y + row * VOCAB_SIZE + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    """Return tanh(x), right to a few units of the last place, also where it is nearly x.

    Below 1 a quotient of polynomials, Lambert's continued fraction cut off after 13, which is
    off by less than 1e-9 of the result; from there on the formula with exp, which would cancel
    below.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 4.5.70.
    """
    size = tl.abs(x)
    square = x * x
    above = x * (135135.0 + square * (17325.0 + square * (378.0 + square)))
    below = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 1.0, tl.div_rn(above, below), tl.where(x < 0, -large, large))


@triton.jit
def _change(
    y, token_ids, values, steps, min_tokens, num_rows, length, stride, values_stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = row < num_rows
    listed = there & (place < length)
    token = tl.load(token_ids + row * stride + place, mask=listed, other=-1).to(tl.int64)
    listed = listed & (token >= 0)
    target = y + row * VOCAB_SIZE + token
    if values is not None:
        value = tl.load(target, mask=listed, other=0.0).to(tl.float32)
        value += tl.load(values + row * values_stride + place, mask=listed, other=0.0)
    else:
        step = tl.load(steps + row, mask=there, other=0)
        listed = listed & (step < tl.load(min_tokens + row, mask=there, other=0))
        value = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    tl.store(target, value.to(y.dtype.element_ty), mask=listed)


_LABEL, _SHAPE = "64 rows of 128256", (64, 128256)
_LOGITS, _FLOATS, _WHOLE = (FP32, *_SHAPE), (FP32, 64), (INT64, 64)
_PENALTIES = ((torch.bool, *_SHAPE), (INT32, *_SHAPE), _FLOATS, _FLOATS, _FLOATS)

BUILDS = (
    *(
        Build(f"{op}_triton", _LABEL, given(_LOGITS, *others), "float32")
        for op, others in (
            ("apply_penalties", _PENALTIES),
            ("apply_temperature", (_FLOATS,)),
            ("apply_token_bitmask", ((INT32, 64, 128256 // 32),)),
            ("apply_logit_bias", ((INT64, 64, 8), (FP32, 64, 8))),
            ("suppress_tokens_until", (_WHOLE, _WHOLE, (INT64, 64, 4))),
        )
    ),
    Build("logits_softcap_triton", "256000 wide", given((BF16, 64, 256000), 30.0)),
    Build(
        "logits_softcap_triton", "float32, 256000 wide", given((FP32, 64, 256000), 30.0), "float32"
    ),
)
