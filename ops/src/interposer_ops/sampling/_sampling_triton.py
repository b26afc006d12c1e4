# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels that sample tokens in two launches: per part of a row, then per row.

B sequences, V vocabulary, C parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP32, INT64, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops.sampling._noise_triton import gumbel_noise, natural_log, stream_key
from interposer_ops.sampling._truncation_triton import distance_bits, limits_of


@triton_kernel("gumbel_argmax")
def gumbel_argmax_triton(
    logits: Tensor, temperature: Tensor, seeds: Tensor, steps: Tensor
) -> Tensor:
    """Compute ``gumbel_argmax``; each part of a row first subtracts its own largest logit."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _draw(logits, temperature, None, None, None, seeds, steps, tokens, None)
    return tokens


@triton_kernel("sample_tokens")
def sample_tokens_triton(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None,
    top_p: Tensor | None, min_p: Tensor | None, seeds: Tensor,
    steps: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``sample_tokens``; with truncation, a launch before finds the limits of each row."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _draw(logits, temperature, top_k, top_p, min_p, seeds, steps, tokens, logprobs)
    return tokens, logprobs


def _draw(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None,
    top_p: Tensor | None, min_p: Tensor | None, seeds: Tensor,
    steps: Tensor, tokens: Tensor, logprobs: Tensor | None,
) -> None:  # fmt: skip
    if logits.numel() == 0:
        return
    rows = as_rows(logits)
    num_rows, vocab_size = rows.shape
    limits = None
    if temperature is None:
        min_p = None
    elif not (top_k is None and top_p is None and min_p is None):
        limits = limits_of(rows, temperature, top_k, top_p)
    tile = row_tile("vocabulary", rows.device, vocab_size)
    num_parts = tile.column_blocks(vocab_size)
    scores, peaks, totals = torch.empty(
        3, num_rows, num_parts, dtype=torch.float32, device=rows.device
    )
    best_tokens = torch.empty(num_rows, num_parts, dtype=torch.int32, device=rows.device)
    _best_of_parts[(num_rows, num_parts)](
        rows, temperature, None if limits is None else limits.peaks,
        None if limits is None else limits.farthest, min_p, seeds, steps, scores, best_tokens,
        peaks, None if logprobs is None else totals, rows.stride(0),
        VOCAB_SIZE=vocab_size, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip
    tile = row_tile("parts", rows.device, num_parts)
    _best_of_rows[(num_rows,)](
        rows, temperature, scores, best_tokens, peaks, None if logprobs is None else totals, tokens,
        logprobs, rows.stride(0), num_parts,
        VOCAB_SIZE=vocab_size, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip


@triton.jit
def _best_of_parts(
    logits, temperature, row_peaks, farthest, min_p, seeds, steps, scores, best_tokens, peaks,
    totals, stride,
    VOCAB_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = row * tl.num_programs(1) + tl.program_id(1)
    inside = column < VOCAB_SIZE
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value, float("-inf"))
    peak = tl.load(row_peaks + row) if row_peaks is not None else tl.max(value)
    # A part of masked tokens only has the peak -inf, and -inf - -inf would be NaN.
    difference = value - tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + part, peak)
    if totals is not None:
        tl.store(totals + part, tl.sum(tl.exp(difference)))
    score = difference
    if temperature is not None:
        divisor = tl.load(temperature + row)
        if divisor > 0:
            score = tl.div_rn(difference, tl.zeros_like(difference) + divisor)
        if row_peaks is not None:
            is_kept = distance_bits(score) <= tl.load(farthest + row).to(tl.uint32)
            if min_p is not None:
                is_kept = is_kept & (score >= natural_log(tl.load(min_p + row)))
            score = tl.where(is_kept, score, float("-inf"))
        if divisor > 0:
            score += gumbel_noise(stream_key(tl.load(seeds + row), tl.load(steps + row)), column)
    best = tl.max(score)
    tl.store(scores + part, best)
    # No score equals NaN; the last token is stored then, so that every stored token exists.
    tl.store(best_tokens + part, tl.min(tl.where(inside & (score == best), column, VOCAB_SIZE - 1)))


@triton.jit
def _best_of_rows(
    logits, temperature, scores, best_tokens, peaks, totals, tokens, logprobs, stride, num_parts,
    VOCAB_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, COLUMNS)
    part_mask = part < num_parts
    position = row * num_parts + part
    score = tl.load(scores + position, mask=part_mask, other=float("-inf"))
    token = tl.load(best_tokens + position, mask=part_mask, other=0)
    peak = tl.load(peaks + position, mask=part_mask, other=float("-inf"))
    highest = tl.max(peak)
    # The peak of a part may be -inf; -inf - -inf would be NaN.
    lower = tl.where(peak == float("-inf"), float("-inf"), peak - highest)
    shift = lower
    if temperature is not None:
        divisor = tl.load(temperature + row)
        if divisor > 0:
            shift = tl.div_rn(lower, tl.zeros_like(lower) + divisor)
    score += shift
    best = tl.max(score)
    winner = tl.min(tl.where(part_mask & (score == best), token, VOCAB_SIZE - 1)).to(tl.int64)
    tl.store(tokens + row, winner)
    if totals is not None:
        total = tl.load(totals + position, mask=part_mask, other=0.0)
        mass = natural_log(tl.sum(total * tl.exp(lower)))
        chosen = tl.load(logits + row * stride + winner).to(tl.float32)
        tl.store(logprobs + row, chosen - (highest + mass))


_LOGITS, _FLOATS, _INTEGERS = (FP32, 64, 128256), (FP32, 64), (INT64, 64)

BUILDS = (
    Build(
        "gumbel_argmax_triton",
        "64 rows of 128256",
        given(_LOGITS, _FLOATS, _INTEGERS, _INTEGERS),
        "float32",
    ),
    Build(
        "sample_tokens_triton",
        "all truncations",
        given(_LOGITS, _FLOATS, _INTEGERS, _FLOATS, _FLOATS, _INTEGERS, _INTEGERS),
        "float32",
    ),
    Build(
        "sample_tokens_triton",
        "greedy, bfloat16",
        given((BF16, 64, 128256), None, None, None, None, _INTEGERS, _INTEGERS),
    ),
)
