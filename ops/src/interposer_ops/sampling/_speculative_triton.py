# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels that verify draft tokens in two launches: per part of a row, then per row.

B sequences, S maximum draft tokens, V vocabulary, C parts of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP32, INT64, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops.sampling._noise_triton import (
    gumbel_noise,
    natural_log,
    stream_key,
    uniform_noise,
)


@triton_kernel("greedy_verify")
def greedy_verify_triton(
    draft_tokens: Tensor, target_logits: Tensor, num_draft: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``greedy_verify``; logits after the bonus position of a row are not read."""
    device = target_logits.device
    batch_size, num_positions, vocab_size = target_logits.shape
    tokens = torch.empty(batch_size, num_positions, dtype=torch.int64, device=device)
    accepted = torch.empty(batch_size, dtype=torch.int64, device=device)
    if batch_size == 0:
        return tokens, accepted
    drafts, logits = as_rows(draft_tokens), _dense(target_logits)
    tile = row_tile("vocabulary", device, vocab_size)
    num_parts = tile.column_blocks(vocab_size)
    best = torch.empty(batch_size, num_positions, num_parts, dtype=torch.float32, device=device)
    best_tokens = torch.empty(
        batch_size, num_positions, num_parts, dtype=torch.int32, device=device
    )
    _best_of_parts[(batch_size * num_positions, num_parts)](
        logits, num_draft, best, best_tokens, logits.stride(0), logits.stride(1), num_positions,
        VOCAB_SIZE=vocab_size, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip
    padded_positions, padded_parts = (
        triton.next_power_of_2(num_positions),
        triton.next_power_of_2(num_parts),
    )
    tile = row_tile("parts", device, padded_positions * padded_parts)
    _verify_greedily[(batch_size,)](
        drafts, num_draft, best, best_tokens, tokens, accepted, drafts.stride(0), num_positions,
        num_parts,
        VOCAB_SIZE=vocab_size, POSITIONS=padded_positions, PARTS=padded_parts, **tile.compiled,
    )  # fmt: skip
    return tokens, accepted


@triton_kernel("rejection_sample")
def rejection_sample_triton(
    draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
    num_draft: Tensor, seeds: Tensor, steps: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``rejection_sample``; only the position that a row draws at is read completely."""
    device = target_probs.device
    batch_size, num_positions, vocab_size = target_probs.shape
    tokens = torch.empty(batch_size, num_positions, dtype=torch.int64, device=device)
    accepted = torch.empty(batch_size, dtype=torch.int64, device=device)
    if batch_size == 0:
        return tokens, accepted
    drafts, target = as_rows(draft_tokens), _dense(target_probs)
    draft = None if draft_probs is None else _dense(draft_probs)
    tile = row_tile("vocabulary", device, vocab_size)
    num_parts = tile.column_blocks(vocab_size)
    # First index: draws from the residual max(p - q, 0), and from the target p.
    best = torch.empty(2, batch_size, num_parts, dtype=torch.float32, device=device)
    best_tokens = torch.empty(2, batch_size, num_parts, dtype=torch.int32, device=device)
    padded_positions = triton.next_power_of_2(num_positions)
    _draw_of_parts[(batch_size, num_parts)](
        drafts, draft, target, num_draft, seeds, steps, accepted, *best, *best_tokens,
        drafts.stride(0), 0 if draft is None else draft.stride(0),
        0 if draft is None else draft.stride(1), target.stride(0), target.stride(1),
        VOCAB_SIZE=vocab_size, POSITIONS=padded_positions, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip
    tile = row_tile("parts", device, num_parts)
    _draw_of_rows[(batch_size,)](
        drafts, accepted, *best, *best_tokens, tokens, drafts.stride(0), num_positions, num_parts,
        VOCAB_SIZE=vocab_size, POSITIONS=padded_positions, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip
    return tokens, accepted


def _dense(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if the elements of a row are not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@triton.jit
def _best_of_parts(
    logits, num_draft, best, best_tokens, stride, position_stride, num_positions,
    VOCAB_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // num_positions).to(tl.int64)
    position = tl.program_id(0) % num_positions
    if position <= tl.load(num_draft + row):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < VOCAB_SIZE
        source = logits + row * stride + position.to(tl.int64) * position_stride + column
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value, float("-inf"))
        part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        largest, token = _first_of_largest(value, column, inside, VOCAB_SIZE)
        tl.store(best + part, largest)
        tl.store(best_tokens + part, token)


@triton.jit
def _verify_greedily(
    draft_tokens, num_draft, best, best_tokens, tokens, accepted, stride, num_positions, num_parts,
    VOCAB_SIZE: tl.constexpr, POSITIONS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, POSITIONS)
    part = tl.arange(0, PARTS)[None, :]
    count = tl.load(num_draft + row)
    is_valid = (position <= count)[:, None] & (part < num_parts)
    source = (row * num_positions + position)[:, None] * num_parts + part
    value = tl.load(best + source, mask=is_valid, other=float("-inf"))
    token = tl.load(best_tokens + source, mask=is_valid, other=0)
    largest = tl.max(value, 1)[:, None]
    token = tl.where(is_valid & (value == largest), token, VOCAB_SIZE - 1)
    token = tl.min(token, 1).to(tl.int64)
    drafted = tl.load(draft_tokens + row * stride + position, mask=position < count, other=0)
    is_accepted = (position < count) & (drafted == token)
    # The first position without acceptance; positions after the drafts are never accepted.
    end = tl.min(tl.where(is_accepted, POSITIONS, position))
    result = tl.where(position < end, drafted, tl.where(position == end, token, -1))
    tl.store(tokens + row * num_positions + position, result, mask=position < num_positions)
    tl.store(accepted + row, end.to(tl.int64))


@triton.jit
def _draw_of_parts(
    draft_tokens, draft_probs, target_probs, num_draft, seeds, steps, accepted, best_residual,
    best_target, residual_tokens, target_tokens, drafts_stride, draft_stride, draft_position_stride,
    target_stride, target_position_stride,
    VOCAB_SIZE: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    draft_tokens += row * drafts_stride
    target_probs += row * target_stride
    count = tl.load(num_draft + row)
    seed, step = tl.load(seeds + row), tl.load(steps + row)
    # Each program counts the accepted drafts itself: few numbers, and no extra launch.
    position = tl.arange(0, POSITIONS).to(tl.int64)
    is_drafted = position < count
    drafted = tl.load(draft_tokens + position, mask=is_drafted, other=0)
    source = target_probs + position * target_position_stride + drafted
    chance = tl.load(source, mask=is_drafted, other=0.0).to(tl.float32)
    uniform = uniform_noise(stream_key(seed, step + position), tl.full((1,), VOCAB_SIZE, tl.int64))
    if draft_probs is not None:
        draft_probs += row * draft_stride
        source = draft_probs + position * draft_position_stride + drafted
        uniform *= tl.load(source, mask=is_drafted, other=0.0).to(tl.float32)
    end = tl.min(tl.where(is_drafted & (uniform < chance), POSITIONS, position))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = row * tl.num_programs(1) + tl.program_id(1)
    inside = column < VOCAB_SIZE
    source = target_probs + end * target_position_stride + column
    target = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    noise = gumbel_noise(stream_key(seed, step + end), column)
    if draft_probs is not None:
        source = draft_probs + end * draft_position_stride + column
        draft = tl.load(source, mask=inside & (end < count), other=0.0).to(tl.float32)
    else:
        # Deterministic drafts: q is 1 for the draft token and 0 elsewhere.
        certain_token = tl.load(draft_tokens + end, mask=end < count, other=-1)
        draft = (column == certain_token).to(tl.float32)
    # At the bonus position ``draft`` is 0, so that the residual is the target distribution.
    residual = tl.maximum(target - draft, 0.0)
    score = tl.where(inside, natural_log(residual) + noise, float("-inf"))
    largest, token = _first_of_largest(score, column, inside, VOCAB_SIZE)
    tl.store(best_residual + part, largest)
    tl.store(residual_tokens + part, token)
    score = tl.where(inside, natural_log(target) + noise, float("-inf"))
    largest, token = _first_of_largest(score, column, inside, VOCAB_SIZE)
    tl.store(best_target + part, largest)
    tl.store(target_tokens + part, token)
    if tl.program_id(1) == 0:
        tl.store(accepted + row, end)


@triton.jit
def _draw_of_rows(
    draft_tokens, accepted, best_residual, best_target, residual_tokens, target_tokens, tokens,
    stride, num_positions, num_parts,
    VOCAB_SIZE: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, COLUMNS)
    part_mask = part < num_parts
    source = row * num_parts + part
    score = tl.load(best_residual + source, mask=part_mask, other=float("-inf"))
    token = tl.load(residual_tokens + source, mask=part_mask, other=0)
    largest, drawn = _first_of_largest(score, token, part_mask, VOCAB_SIZE)
    if largest == float("-inf"):  # the residual is zero: both distributions are equal
        score = tl.load(best_target + source, mask=part_mask, other=float("-inf"))
        token = tl.load(target_tokens + source, mask=part_mask, other=0)
        largest, drawn = _first_of_largest(score, token, part_mask, VOCAB_SIZE)
    end = tl.load(accepted + row)
    position = tl.arange(0, POSITIONS)
    drafted = tl.load(draft_tokens + row * stride + position, mask=position < end, other=0)
    result = tl.where(position < end, drafted, tl.where(position == end, drawn.to(tl.int64), -1))
    tl.store(tokens + row * num_positions + position, result, mask=position < num_positions)


@triton.jit
def _first_of_largest(value, token, mask, VOCAB_SIZE: tl.constexpr):
    """Return the largest value and the lowest token with that value; the last token for NaN."""
    largest = tl.max(tl.where(mask, value, float("-inf")))
    return largest, tl.min(tl.where(mask & (value == largest), token, VOCAB_SIZE - 1))


_DRAFTS, _INTEGERS = (INT64, 64, 4), (INT64, 64)


def _rejection_arguments(draft: tuple[Any, ...] | None) -> Callable[..., Any]:
    return given(_DRAFTS, draft, (FP32, 64, 5, 128256), _INTEGERS, _INTEGERS, _INTEGERS)


BUILDS = (
    Build(
        "greedy_verify_triton",
        "4 drafts, bfloat16",
        given(_DRAFTS, (BF16, 64, 5, 128256), _INTEGERS),
    ),
    Build(
        "rejection_sample_triton",
        "4 drafts",
        _rejection_arguments((FP32, 64, 4, 128256)),
        "float32",
    ),
    Build("rejection_sample_triton", "4 certain drafts", _rejection_arguments(None), "float32"),
)
