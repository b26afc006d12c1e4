# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The truncations of a distribution, without sorting. B sequences, V vocabulary.

What top-k and top-p keep are the tokens up to some distance from the likeliest one. The largest
such distance is found bit by bit, from the highest: a distance is not negative, so that the bits
of floats have the order of their values. Top-k counts the tokens that are nearer, top-p adds
their probabilities, as integers: in whatever order, sums are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import FP32, INT64, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops.sampling._logits_triton import each_logit
from interposer_ops.sampling._noise_triton import natural_log

_UNITS = tl.constexpr(4503599627370496.0)  # 2^52, of probability mass in 1
_BEYOND = tl.constexpr(0xFFFFFFFF)  # farther than any distance, infinity included


class Limits(NamedTuple):
    """The part of each row that is kept.

    Attributes:
        peaks: ``[B]`` float32, the largest logit.
        farthest: ``[B]`` int64, the largest ``distance_bits`` that is kept.
    """

    peaks: Tensor
    farthest: Tensor


@triton_kernel("mask_top_k_top_p")
def mask_top_k_top_p_triton(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Compute ``mask_top_k_top_p``."""
    return _cut(logits, top_k, top_p, None)


@triton_kernel("mask_min_p")
def mask_min_p_triton(logits: Tensor, min_p: Tensor) -> Tensor:
    """Compute ``mask_min_p``."""
    return _cut(logits, None, None, min_p)


def limits_of(
    rows: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None
) -> Limits:
    """Return what top-k and top-p keep of each row, divided by its temperature before.

    The block ``pivots``, 2, 4, 16 or 256, says how many distances are tried at a time.

    Args:
        rows: ``[B, V]``, neither 0; elements of a row follow each other.
    """
    num_rows, vocab_size = rows.shape
    peaks = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    farthest = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    tile = row_tile("truncation", rows.device, vocab_size)
    pivots = parameters_for("truncation", rows.device).blocks["pivots"]
    _limit[(num_rows,)](
        rows, temperature, top_k, top_p, peaks, farthest, rows.stride(0),
        VOCAB_SIZE=vocab_size, COLUMNS=tile.columns, PIVOTS=pivots, BITS=pivots.bit_length() - 1,
        **tile.compiled,
    )  # fmt: skip
    return Limits(peaks, farthest)


def _cut(
    logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    if logits.numel() == 0:
        return logits.new_empty(logits.shape)
    limits = limits_of(as_rows(logits), None, top_k, top_p)
    return each_logit(_mask, logits, *limits, min_p)


@triton.jit
def distance_bits(scaled):
    """Return the bits of minus a float32 that is not positive, as uint32."""
    return (scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _limit(
    logits, temperature, top_k, top_p, peaks, farthest, stride,
    VOCAB_SIZE: tl.constexpr, COLUMNS: tl.constexpr, PIVOTS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, COLUMNS)[None, :]
    largest = tl.full((1, COLUMNS), float("-inf"), tl.float32)
    for start in range(0, VOCAB_SIZE, COLUMNS):
        inside = start + column < VOCAB_SIZE
        value = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.where(inside, value, float("-inf")))
    peak = tl.max(largest)
    divisor = 1.0
    if temperature is not None:
        divisor = tl.load(temperature + row)
        divisor = tl.where(divisor > 0, divisor, 1.0)
    pivot = tl.arange(0, PIVOTS)[:, None].to(tl.uint32)
    limit = tl.full((1, 1), _BEYOND, tl.uint32)
    if top_k is not None:
        count = tl.load(top_k + row)
        bound = tl.where((count > 0) & (count < VOCAB_SIZE), count, VOCAB_SIZE + 1).to(tl.int32)
        limit = tl.zeros((1, 1), tl.uint32)
        for turn in range(32 // BITS):
            shift = 32 - BITS * (turn + 1)
            tried = limit + (pivot << shift)
            nearer = tl.zeros((PIVOTS, COLUMNS), tl.int32)
            for start in range(0, VOCAB_SIZE, COLUMNS):
                _, bits = _scaled(logits, start, column, peak, divisor, VOCAB_SIZE)
                nearer += (bits < tried).to(tl.int32)
            met = (tl.sum(nearer, 1)[:, None] < bound).to(tl.int32)
            limit += (tl.maximum(tl.sum(met, 0) - 1, 0)[None, :]).to(tl.uint32) << shift
    if top_p is not None:
        share = tl.load(top_p + row).to(tl.float32)
        share = tl.where(share >= 1.0, 2.0, share)  # all of them, however their sum is rounded
        powers = tl.zeros((1, COLUMNS), tl.float32)
        for start in range(0, VOCAB_SIZE, COLUMNS):
            scaled, bits = _scaled(logits, start, column, peak, divisor, VOCAB_SIZE)
            is_kept = (bits <= limit) & (start + column < VOCAB_SIZE)
            powers += tl.where(is_kept, tl.exp(scaled), 0.0)
        total = tl.sum(powers)
        nucleus = tl.zeros((1, 1), tl.uint32)
        for turn in range(32 // BITS):
            shift = 32 - BITS * (turn + 1)
            tried = nucleus + (pivot << shift)
            mass = tl.zeros((PIVOTS, COLUMNS), tl.int64)
            for start in range(0, VOCAB_SIZE, COLUMNS):
                scaled, bits = _scaled(logits, start, column, peak, divisor, VOCAB_SIZE)
                is_kept = (bits <= limit) & (start + column < VOCAB_SIZE)
                power = tl.where(is_kept, tl.exp(scaled), 0.0)
                part = tl.div_rn(power, tl.zeros_like(power) + total)
                units = (part * _UNITS).to(tl.int64)
                mass += tl.where(bits < tried, units, 0)
            likelier = tl.sum(mass, 1)[:, None].to(tl.float32) * (1.0 / _UNITS)
            met = (likelier < share).to(tl.int32)
            # None is met for a share of 0, which keeps the likeliest alone.
            nucleus += (tl.maximum(tl.sum(met, 0) - 1, 0)[None, :]).to(tl.uint32) << shift
        limit = tl.minimum(limit, nucleus)
    tl.store(peaks + row, peak)
    tl.store(farthest + row, tl.max(limit.to(tl.int64)))


@triton.jit
def _scaled(logits, start, column, peak, divisor, VOCAB_SIZE: tl.constexpr):
    """Return a part of the tempered row and its distances' bits; none is less than those beyond."""
    inside = start + column < VOCAB_SIZE
    value = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
    difference = tl.where(inside, value, float("-inf")) - peak
    scaled = tl.div_rn(difference, tl.zeros_like(difference) + divisor)
    return scaled, tl.where(inside, distance_bits(scaled), _BEYOND)


@triton.jit
def _mask(
    logits, peaks, farthest, min_p, y, num_rows, stride,
    VOCAB_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = row < num_rows
    inside = there & (column < VOCAB_SIZE)
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    peak = tl.load(peaks + row, mask=there, other=0.0)
    limit = tl.load(farthest + row, mask=there, other=0).to(tl.uint32)
    scaled = value - peak
    is_kept = distance_bits(scaled) <= limit
    if min_p is not None:
        ratio = tl.load(min_p + row, mask=there, other=0.0).to(tl.float32)
        is_kept = is_kept & (scaled >= natural_log(ratio))
    value = tl.where(is_kept, value, float("-inf"))
    tl.store(y + row * VOCAB_SIZE + column, value.to(y.dtype.element_ty), mask=inside)


_LOGITS, _FLOATS, _LABEL = (FP32, 64, 128256), (FP32, 64), "64 rows of 128256"

BUILDS = (
    Build("mask_top_k_top_p_triton", _LABEL, given(_LOGITS, (INT64, 64), _FLOATS), "float32"),
    Build("mask_min_p_triton", _LABEL, given(_LOGITS, _FLOATS), "float32"),
)
