# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels that edit logits: penalties, temperature, masks, bias and softcap.

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
    """Compute ``apply_penalties`` in Triton: repetition, presence and frequency."""
    matrices, columns = (prompt_mask, output_counts), (repetition, presence, frequency)
    return map_logits(_penalties, logits, *matrices, *columns, dtype=torch.float32)


@triton_kernel("apply_temperature")
def apply_temperature_triton(logits: Tensor, temperature: Tensor) -> Tensor:
    """Compute ``apply_temperature`` in Triton: divide each row by its temperature."""
    return map_logits(_divide_by_temperature, logits, temperature, dtype=torch.float32)


@triton_kernel("apply_token_bitmask")
def apply_token_bitmask_triton(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Compute ``apply_token_bitmask`` in Triton: mask the tokens whose bit is 0."""
    return map_logits(_apply_bitmask, logits, bitmask)


@triton_kernel("logits_softcap")
def logits_softcap_triton(logits: Tensor, cap: float) -> Tensor:
    """Compute ``logits_softcap`` in Triton: cap * tanh(x / cap)."""
    return map_logits(_softcap, logits, float(cap), tuning="softcap")


def map_logits(
    kernel: Any,
    logits: Tensor,
    *operands: Tensor | float | None,
    dtype: torch.dtype | None = None,
    tuning: str = "logits",
) -> Tensor:
    """Launch an elementwise ``kernel`` over all logits and return the result.

    The kernel takes logits, operands, the result, the number of rows, the row stride of the logits,
    and the row stride of each matrix among the operands.

    Args:
        dtype: dtype of the result, by default that of the logits.
        tuning: name of the file of launch parameters.
    """
    y = torch.empty(logits.shape, dtype=dtype or logits.dtype, device=logits.device)
    if y.numel() == 0:
        return y
    rows = as_rows(logits)
    kernel_operands = [as_rows(x) if isinstance(x, Tensor) and x.ndim > 1 else x for x in operands]
    num_rows, vocab_size = rows.shape
    tile = row_tile(tuning, y.device, vocab_size)
    strides = [x.stride(0) for x in kernel_operands if isinstance(x, Tensor) and x.ndim > 1]
    kernel[(tile.row_blocks(num_rows), tile.column_blocks(vocab_size))](
        rows,
        *kernel_operands,
        y,
        num_rows,
        rows.stride(0),
        *strides,
        VOCAB_SIZE=vocab_size,
        **tile.options,
    )
    return y


@triton_kernel("apply_logit_bias")
def apply_logit_bias_triton(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Compute ``apply_logit_bias``: copy the logits, then change only the listed tokens."""
    y = logits.clone(memory_format=torch.contiguous_format)
    _launch_edit_listed(y, token_ids, as_rows(values), None, None)
    return y


@triton_kernel("suppress_tokens_until")
def suppress_tokens_until_triton(
    logits: Tensor, steps: Tensor, min_tokens: Tensor, stop_ids: Tensor
) -> Tensor:
    """Compute ``suppress_tokens_until``: copy the logits, then change only the listed tokens."""
    y = logits.clone(memory_format=torch.contiguous_format)
    _launch_edit_listed(y, stop_ids, None, steps, min_tokens)
    return y


def _launch_edit_listed(
    y: Tensor, token_ids: Tensor, values: Tensor | None,
    steps: Tensor | None, min_tokens: Tensor | None,
) -> None:  # fmt: skip
    """Add ``values`` to the listed tokens, or mask the tokens if ``steps`` < ``min_tokens``."""
    if y.numel() == 0 or token_ids.numel() == 0:
        return
    listed = as_rows(token_ids)
    num_rows, length = listed.shape
    tile = row_tile("listed_tokens", y.device, length)
    _edit_listed[(tile.row_blocks(num_rows), tile.column_blocks(length))](
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
    row_mask = row < num_rows
    inside = row_mask & (column < VOCAB_SIZE)
    factor = tl.load(repetition + row, mask=row_mask, other=1.0).to(tl.float32)
    presence_penalty = tl.load(presence + row, mask=row_mask, other=0.0).to(tl.float32)
    frequency_penalty = tl.load(frequency + row, mask=row_mask, other=0.0).to(tl.float32)
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    prompted = tl.load(prompt_mask + row * mask_stride + column, mask=inside, other=0) != 0
    count = tl.load(output_counts + row * counts_stride + column, mask=inside, other=0)
    generated = count > 0
    # div_rn does not broadcast, so the factor is added to zeros of the shape of ``value``.
    quotient = tl.div_rn(value, tl.zeros_like(value) + factor)
    repeated = tl.where(value > 0, quotient, value * factor)
    value = tl.where(prompted | generated, repeated, value)
    value -= presence_penalty * generated.to(tl.float32)
    value -= frequency_penalty * count.to(tl.float32)
    tl.store(y + row * VOCAB_SIZE + column, value, mask=inside)


@triton.jit
def _divide_by_temperature(
    logits, temperature, y, num_rows, stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row_mask = row < num_rows
    inside = row_mask & (column < VOCAB_SIZE)
    divisor = tl.load(temperature + row, mask=row_mask, other=1.0).to(tl.float32)
    divisor = tl.where(divisor > 0, divisor, 1.0)
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.div_rn(value, tl.zeros_like(value) + divisor)
    tl.store(y + row * VOCAB_SIZE + column, value, mask=inside)


@triton.jit
def _apply_bitmask(
    logits, bitmask, y, num_rows, stride, mask_stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < VOCAB_SIZE)
    word = tl.load(bitmask + row * mask_stride + column // 32, mask=inside, other=0)
    is_allowed = ((word >> (column % 32)) & 1) != 0
    # Logits of masked tokens need not be read.
    source = logits + row * stride + column
    value = tl.load(source, mask=inside & is_allowed, other=0.0).to(tl.float32)
    value = tl.where(is_allowed, value, float("-inf"))
    tl.store(y + row * VOCAB_SIZE + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _softcap(
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
    """Return tanh(x) with an error of few units in the last place, also for small x.

    For |x| < 1, Lambert's continued fraction truncated after 13, a quotient of polynomials with a
    relative error below 1e-9. For larger |x|, the formula with exp, which would lose digits by
    cancellation for small x.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 4.5.70.
    """
    size = tl.abs(x)
    square = x * x
    numerator = x * (135135.0 + square * (17325.0 + square * (378.0 + square)))
    denominator = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 1.0, tl.div_rn(numerator, denominator), tl.where(x < 0, -large, large))


@triton.jit
def _edit_listed(
    y, token_ids, values, steps, min_tokens, num_rows, length, stride, values_stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    position = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row_mask = row < num_rows
    listed_mask = row_mask & (position < length)
    token = tl.load(token_ids + row * stride + position, mask=listed_mask, other=-1).to(tl.int64)
    # Padding has the token -1.
    listed_mask = listed_mask & (token >= 0)
    target = y + row * VOCAB_SIZE + token
    if values is not None:
        value = tl.load(target, mask=listed_mask, other=0.0).to(tl.float32)
        value += tl.load(values + row * values_stride + position, mask=listed_mask, other=0.0)
    else:
        step = tl.load(steps + row, mask=row_mask, other=0)
        listed_mask = listed_mask & (step < tl.load(min_tokens + row, mask=row_mask, other=0))
        value = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    tl.store(target, value.to(y.dtype.element_ty), mask=listed_mask)


_LABEL, _SHAPE = "64 rows of 128256", (64, 128256)
_LOGITS, _FLOATS, _INTEGERS = (FP32, *_SHAPE), (FP32, 64), (INT64, 64)
_PENALTIES = ((torch.bool, *_SHAPE), (INT32, *_SHAPE), _FLOATS, _FLOATS, _FLOATS)

BUILDS = (
    *(
        Build(f"{op}_triton", _LABEL, given(_LOGITS, *operands), "float32")
        for op, operands in (
            ("apply_penalties", _PENALTIES),
            ("apply_temperature", (_FLOATS,)),
            ("apply_token_bitmask", ((INT32, 64, 128256 // 32),)),
            ("apply_logit_bias", ((INT64, 64, 8), (FP32, 64, 8))),
            ("suppress_tokens_until", (_INTEGERS, _INTEGERS, (INT64, 64, 4))),
        )
    ),
    Build("logits_softcap_triton", "256000 wide", given((BF16, 64, 256000), 30.0)),
    Build(
        "logits_softcap_triton", "float32, 256000 wide", given((FP32, 64, 256000), 30.0), "float32"
    ),
)
