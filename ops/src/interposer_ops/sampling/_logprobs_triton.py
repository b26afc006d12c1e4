# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels for log probabilities in two launches: per part of a row, then per row.

B sequences, V vocabulary, C parts of a row, N likeliest tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer import Dim
from interposer_ops._triton.build import BF16, FP32, INT64, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops.sampling._noise_triton import natural_log


@triton_kernel("token_logprobs", dims={"num_top": Dim(at_most=64)})
def token_logprobs_triton(
    logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``token_logprobs``; a row's top tokens are among the top tokens of its parts."""
    num_rows, vocab_size = logits.shape
    device, wide = logits.device, torch.float32
    logprobs = torch.empty(num_rows, dtype=wide, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(num_rows, num_top, dtype=wide, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    if num_rows == 0:
        return logprobs, ranks, top_logprobs, top_ids
    rows = as_rows(logits)
    tile = row_tile("vocabulary", device, vocab_size)
    num_parts = tile.column_blocks(vocab_size)
    slots = triton.next_power_of_2(num_top) if num_top else 0
    peaks, totals = torch.empty(2, num_rows, num_parts, dtype=wide, device=device)
    likelier = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    best = torch.empty(num_rows, num_parts, slots, dtype=wide, device=device)
    top_tokens = torch.empty(num_rows, num_parts, slots, dtype=torch.int32, device=device)
    _logprobs_of_parts[(num_rows, num_parts)](
        rows, tokens, peaks, totals, likelier, best, top_tokens, rows.stride(0), num_top,
        VOCAB_SIZE=vocab_size, SLOTS=slots, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip
    tile = row_tile("parts", device, num_parts * max(slots, 1))
    _logprobs_of_rows[(num_rows,)](
        rows, tokens, peaks, totals, likelier, best, top_tokens, logprobs, ranks, top_logprobs,
        top_ids, rows.stride(0), num_parts, num_top,
        VOCAB_SIZE=vocab_size, SLOTS=slots, PARTS=triton.next_power_of_2(num_parts),
        **tile.compiled,
    )  # fmt: skip
    return logprobs, ranks, top_logprobs, top_ids


@triton.jit
def _logprobs_of_parts(
    logits, tokens, peaks, totals, likelier, best, top_tokens, stride, num_top,
    VOCAB_SIZE: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = row * tl.num_programs(1) + tl.program_id(1)
    inside = column < VOCAB_SIZE
    logits += row * stride
    value = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value, float("-inf"))
    chosen = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    peak = tl.max(value)
    power = tl.exp(value - tl.where(peak == float("-inf"), 0.0, peak))
    tl.store(peaks + part, peak)
    tl.store(totals + part, tl.sum(power))
    tl.store(likelier + part, tl.sum((value > chosen).to(tl.int32)))
    if SLOTS > 0:
        remaining = inside
        for slot in range(num_top):
            # Once no column remains, ``token`` is VOCAB_SIZE, which marks an empty slot.
            largest = tl.max(tl.where(remaining, value, float("-inf")))
            token = tl.min(tl.where(remaining & (value == largest), column, VOCAB_SIZE))
            tl.store(best + part * SLOTS + slot, largest)
            tl.store(top_tokens + part * SLOTS + slot, token)
            remaining = remaining & (column != token)


@triton.jit
def _logprobs_of_rows(
    logits, tokens, peaks, totals, likelier, best, top_tokens, logprobs, ranks, top_logprobs,
    top_ids, stride, num_parts, num_top,
    VOCAB_SIZE: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    position = row * num_parts + part
    peak = tl.load(peaks + position, mask=part < num_parts, other=float("-inf"))
    total = tl.load(totals + position, mask=part < num_parts, other=0.0)
    count = tl.load(likelier + position, mask=part < num_parts, other=0)
    highest = tl.max(peak)
    mass = highest + natural_log(tl.sum(total * tl.exp(peak - highest)))
    chosen = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(logprobs + row, chosen - mass)
    tl.store(ranks + row, (tl.sum(count) + 1).to(tl.int64))
    if SLOTS > 0:
        candidate = tl.arange(0, PARTS * SLOTS)
        is_valid = (candidate // SLOTS < num_parts) & (candidate % SLOTS < num_top)
        position = row * num_parts * SLOTS + candidate
        value = tl.load(best + position, mask=is_valid, other=float("-inf"))
        token = tl.load(top_tokens + position, mask=is_valid, other=VOCAB_SIZE)
        remaining = token < VOCAB_SIZE
        for slot in range(num_top):
            largest = tl.max(tl.where(remaining, value, float("-inf")))
            winner = tl.min(tl.where(remaining & (value == largest), token, VOCAB_SIZE))
            tl.store(top_logprobs + row * num_top + slot, largest - mass)
            # No value equals NaN; the last token is stored then, so that every stored token exists.
            valid_winner = tl.minimum(winner, VOCAB_SIZE - 1).to(tl.int64)
            tl.store(top_ids + row * num_top + slot, valid_winner)
            remaining = remaining & (token != winner)


BUILDS = (
    Build(
        "token_logprobs_triton",
        "20 likeliest of 128256",
        given((FP32, 64, 128256), (INT64, 64), 20),
        "float32",
        {"num_top": 20},
    ),
    Build(
        "token_logprobs_triton",
        "none of the likeliest",
        given((BF16, 64, 128256), (INT64, 64), 0),
        dims={"num_top": 0},
    ),
)
