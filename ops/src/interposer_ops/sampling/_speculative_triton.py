# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Verification of drafted tokens in two launches: the best token of each part, then the row's.

B sequences, S drafted tokens at most, V vocabulary, C parts of the vocabulary.
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
    """Compute ``greedy_verify``; places behind a row's drafts and one more are not read."""
    device = target_logits.device
    batch_size, places, vocab_size = target_logits.shape
    tokens = torch.empty(batch_size, places, dtype=torch.int64, device=device)
    accepted = torch.empty(batch_size, dtype=torch.int64, device=device)
    if batch_size == 0:
        return tokens, accepted
    drafts, logits = as_rows(draft_tokens), _dense(target_logits)
    tile = row_tile("vocabulary", device, vocab_size)
    parts = tile.column_blocks(vocab_size)
    best = torch.empty(batch_size, places, parts, dtype=torch.float32, device=device)
    found = torch.empty(batch_size, places, parts, dtype=torch.int32, device=device)
    _best_of_parts[(batch_size * places, parts)](
        logits, num_draft, best, found, logits.stride(0), logits.stride(1), places,
        VOCAB_SIZE=vocab_size, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip
    all_places, all_parts = triton.next_power_of_2(places), triton.next_power_of_2(parts)
    tile = row_tile("parts", device, all_places * all_parts)
    _verify_greedily[(batch_size,)](
        drafts, num_draft, best, found, tokens, accepted, drafts.stride(0), places, parts,
        VOCAB_SIZE=vocab_size, PLACES=all_places, PARTS=all_parts, **tile.compiled,
    )  # fmt: skip
    return tokens, accepted


@triton_kernel("rejection_sample")
def rejection_sample_triton(
    draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
    num_draft: Tensor, seeds: Tensor, steps: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``rejection_sample``; of each row, only the one place that is drawn at is read."""
    device = target_probs.device
    batch_size, places, vocab_size = target_probs.shape
    tokens = torch.empty(batch_size, places, dtype=torch.int64, device=device)
    accepted = torch.empty(batch_size, dtype=torch.int64, device=device)
    if batch_size == 0:
        return tokens, accepted
    drafts, target = as_rows(draft_tokens), _dense(target_probs)
    draft = None if draft_probs is None else _dense(draft_probs)
    tile = row_tile("vocabulary", device, vocab_size)
    parts = tile.column_blocks(vocab_size)
    # Of the difference of the distributions, and of the target's alone.
    best = torch.empty(2, batch_size, parts, dtype=torch.float32, device=device)
    found = torch.empty(2, batch_size, parts, dtype=torch.int32, device=device)
    all_places = triton.next_power_of_2(places)
    _draw_of_parts[(batch_size, parts)](
        drafts, draft, target, num_draft, seeds, steps, accepted, *best, *found, drafts.stride(0),
        0 if draft is None else draft.stride(0), 0 if draft is None else draft.stride(1),
        target.stride(0), target.stride(1),
        VOCAB_SIZE=vocab_size, PLACES=all_places, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip
    tile = row_tile("parts", device, parts)
    _draw_of_rows[(batch_size,)](
        drafts, accepted, *best, *found, tokens, drafts.stride(0), places, parts,
        VOCAB_SIZE=vocab_size, PLACES=all_places, COLUMNS=tile.columns, **tile.compiled,
    )  # fmt: skip
    return tokens, accepted


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with the elements of a row side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@triton.jit
def _best_of_parts(
    logits, num_draft, best, found, stride, place_stride, num_places,
    VOCAB_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // num_places).to(tl.int64)
    place = tl.program_id(0) % num_places
    if place <= tl.load(num_draft + row):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < VOCAB_SIZE
        source = logits + row * stride + place.to(tl.int64) * place_stride + column
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value, float("-inf"))
        part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        largest, token = _first_of_largest(value, column, inside, VOCAB_SIZE)
        tl.store(best + part, largest)
        tl.store(found + part, token)


@triton.jit
def _verify_greedily(
    draft_tokens, num_draft, best, found, tokens, accepted, stride, num_places, num_parts,
    VOCAB_SIZE: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    part = tl.arange(0, PARTS)[None, :]
    count = tl.load(num_draft + row)
    given = (place <= count)[:, None] & (part < num_parts)
    source = (row * num_places + place)[:, None] * num_parts + part
    value = tl.load(best + source, mask=given, other=float("-inf"))
    token = tl.load(found + source, mask=given, other=0)
    largest = tl.max(value, 1)[:, None]
    token = tl.where(given & (value == largest), token, VOCAB_SIZE - 1)
    token = tl.min(token, 1).to(tl.int64)
    drafted = tl.load(draft_tokens + row * stride + place, mask=place < count, other=0)
    is_accepted = (place < count) & (drafted == token)
    end = tl.min(tl.where(is_accepted, PLACES, place))
    result = tl.where(place < end, drafted, tl.where(place == end, token, -1))
    tl.store(tokens + row * num_places + place, result, mask=place < num_places)
    tl.store(accepted + row, end.to(tl.int64))


@triton.jit
def _draw_of_parts(
    draft_tokens, draft_probs, target_probs, num_draft, seeds, steps, accepted, best_rest,
    best_target, found_rest, found_target, drafts_stride, draft_stride, draft_place_stride,
    target_stride, target_place_stride,
    VOCAB_SIZE: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    draft_tokens += row * drafts_stride
    target_probs += row * target_stride
    count = tl.load(num_draft + row)
    seed, step = tl.load(seeds + row), tl.load(steps + row)
    # Every part finds out how many drafts are accepted: these are few numbers to read.
    place = tl.arange(0, PLACES).to(tl.int64)
    is_drafted = place < count
    drafted = tl.load(draft_tokens + place, mask=is_drafted, other=0)
    source = target_probs + place * target_place_stride + drafted
    chance = tl.load(source, mask=is_drafted, other=0.0).to(tl.float32)
    uniform = uniform_noise(stream_key(seed, step + place), tl.full((1,), VOCAB_SIZE, tl.int64))
    if draft_probs is not None:
        draft_probs += row * draft_stride
        source = draft_probs + place * draft_place_stride + drafted
        uniform *= tl.load(source, mask=is_drafted, other=0.0).to(tl.float32)
    end = tl.min(tl.where(is_drafted & (uniform < chance), PLACES, place))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = row * tl.num_programs(1) + tl.program_id(1)
    inside = column < VOCAB_SIZE
    source = target_probs + end * target_place_stride + column
    target = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    noise = gumbel_noise(stream_key(seed, step + end), column)
    if draft_probs is not None:
        source = draft_probs + end * draft_place_stride + column
        draft = tl.load(source, mask=inside & (end < count), other=0.0).to(tl.float32)
    else:
        certain = tl.load(draft_tokens + end, mask=end < count, other=-1)
        draft = (column == certain).to(tl.float32)
    # Behind the last draft, what is drawn from is the target, where nothing is subtracted.
    rest = tl.maximum(target - draft, 0.0)
    score = tl.where(inside, natural_log(rest) + noise, float("-inf"))
    largest, token = _first_of_largest(score, column, inside, VOCAB_SIZE)
    tl.store(best_rest + part, largest)
    tl.store(found_rest + part, token)
    score = tl.where(inside, natural_log(target) + noise, float("-inf"))
    largest, token = _first_of_largest(score, column, inside, VOCAB_SIZE)
    tl.store(best_target + part, largest)
    tl.store(found_target + part, token)
    if tl.program_id(1) == 0:
        tl.store(accepted + row, end)


@triton.jit
def _draw_of_rows(
    draft_tokens, accepted, best_rest, best_target, found_rest, found_target, tokens, stride,
    num_places, num_parts,
    VOCAB_SIZE: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, COLUMNS)
    there = part < num_parts
    source = row * num_parts + part
    score = tl.load(best_rest + source, mask=there, other=float("-inf"))
    token = tl.load(found_rest + source, mask=there, other=0)
    largest, drawn = _first_of_largest(score, token, there, VOCAB_SIZE)
    if largest == float("-inf"):  # both distributions are the same
        score = tl.load(best_target + source, mask=there, other=float("-inf"))
        token = tl.load(found_target + source, mask=there, other=0)
        largest, drawn = _first_of_largest(score, token, there, VOCAB_SIZE)
    end = tl.load(accepted + row)
    place = tl.arange(0, PLACES)
    drafted = tl.load(draft_tokens + row * stride + place, mask=place < end, other=0)
    result = tl.where(place < end, drafted, tl.where(place == end, drawn.to(tl.int64), -1))
    tl.store(tokens + row * num_places + place, result, mask=place < num_places)


@triton.jit
def _first_of_largest(value, token, there, VOCAB_SIZE: tl.constexpr):
    """Return the largest value and the lowest token that has it, the last one among NaNs."""
    largest = tl.max(tl.where(there, value, float("-inf")))
    return largest, tl.min(tl.where(there & (value == largest), token, VOCAB_SIZE - 1))


_DRAFTS, _WHOLE = (INT64, 64, 4), (INT64, 64)


def _rejected(draft: tuple[Any, ...] | None) -> Callable[..., Any]:
    return given(_DRAFTS, draft, (FP32, 64, 5, 128256), _WHOLE, _WHOLE, _WHOLE)


BUILDS = (
    Build(
        "greedy_verify_triton", "4 drafts, bfloat16", given(_DRAFTS, (BF16, 64, 5, 128256), _WHOLE)
    ),
    Build("rejection_sample_triton", "4 drafts", _rejected((FP32, 64, 4, 128256)), "float32"),
    Build("rejection_sample_triton", "4 certain drafts", _rejected(None), "float32"),
)
