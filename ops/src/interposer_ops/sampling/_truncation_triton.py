# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels for top-k, top-p and min-p without sorting.

Top-k and top-p keep the tokens up to some distance from the likeliest token. A radix search finds
the largest kept distance from the highest bit down: distances are not negative, so that the bits of
floats have the order of the values. Top-k counts the tokens that are nearer; top-p adds the
probabilities of these tokens as integers, whose sum does not depend on the order.

B sequences, V vocabulary.
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
from interposer_ops.sampling._logits_triton import map_logits
from interposer_ops.sampling._noise_triton import natural_log

_UNITS = tl.constexpr(4503599627370496.0)  # 2^52 fixed-point units in a probability of 1
_BEYOND = tl.constexpr(0xFFFFFFFF)  # greater than the bits of any distance, including infinity


class Limits(NamedTuple):
    """Truncation limits of each row, as distances from the likeliest token's logit.

    Attributes:
        peaks: ``[B]`` float32, the largest logit.
        farthest: ``[B]`` int64, the largest kept ``distance_bits``.
    """

    peaks: Tensor
    farthest: Tensor


@triton_kernel("mask_top_k_top_p")
def mask_top_k_top_p_triton(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Compute ``mask_top_k_top_p`` in Triton: mask the tokens outside top-k and top-p."""
    return _launch_mask(logits, top_k, top_p, None)


@triton_kernel("mask_min_p")
def mask_min_p_triton(logits: Tensor, min_p: Tensor) -> Tensor:
    """Compute ``mask_min_p`` in Triton: mask the tokens below min-p."""
    return _launch_mask(logits, None, None, min_p)


def limits_of(
    rows: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None
) -> Limits:
    """Return the limits of top-k and top-p for each row, after division by the temperature.

    The block ``pivots`` of the tuning file, 2, 4, 16 or 256, is the number of distances that each
    pass over the row tests.

    Args:
        rows: ``[B, V]``, not empty; the elements of a row are contiguous.
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


def _launch_mask(
    logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    if logits.numel() == 0:
        return logits.new_empty(logits.shape)
    limits = limits_of(as_rows(logits), None, top_k, top_p)
    return map_logits(_mask, logits, *limits, min_p)


@triton.jit
def distance_bits(scaled):
    """Return the bits of ``-scaled`` as uint32, which sort like the distances."""
    # Clearing the sign bit negates a number that is not positive, also -0.
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
        # 0 and numbers from V on mean no limit: no count of nearer tokens reaches V + 1.
        max_tokens = tl.where((count > 0) & (count < VOCAB_SIZE), count, VOCAB_SIZE + 1).to(
            tl.int32
        )
        limit = tl.zeros((1, 1), tl.uint32)
        for digit in range(32 // BITS):
            shift = 32 - BITS * (digit + 1)
            candidate = limit + (pivot << shift)
            nearer = tl.zeros((PIVOTS, COLUMNS), tl.int32)
            for start in range(0, VOCAB_SIZE, COLUMNS):
                _, bits = _scaled(logits, start, column, peak, divisor, VOCAB_SIZE)
                nearer += (bits < candidate).to(tl.int32)
            is_within = (tl.sum(nearer, 1)[:, None] < max_tokens).to(tl.int32)
            limit += (tl.maximum(tl.sum(is_within, 0) - 1, 0)[None, :]).to(tl.uint32) << shift
    if top_p is not None:
        max_mass = tl.load(top_p + row).to(tl.float32)
        # 1 keeps all tokens, also if the sum of their probabilities rounds above 1.
        max_mass = tl.where(max_mass >= 1.0, 2.0, max_mass)
        powers = tl.zeros((1, COLUMNS), tl.float32)
        for start in range(0, VOCAB_SIZE, COLUMNS):
            scaled, bits = _scaled(logits, start, column, peak, divisor, VOCAB_SIZE)
            is_kept = (bits <= limit) & (start + column < VOCAB_SIZE)
            powers += tl.where(is_kept, tl.exp(scaled), 0.0)
        total = tl.sum(powers)
        nucleus = tl.zeros((1, 1), tl.uint32)
        for digit in range(32 // BITS):
            shift = 32 - BITS * (digit + 1)
            candidate = nucleus + (pivot << shift)
            mass = tl.zeros((PIVOTS, COLUMNS), tl.int64)
            for start in range(0, VOCAB_SIZE, COLUMNS):
                scaled, bits = _scaled(logits, start, column, peak, divisor, VOCAB_SIZE)
                is_kept = (bits <= limit) & (start + column < VOCAB_SIZE)
                power = tl.where(is_kept, tl.exp(scaled), 0.0)
                part = tl.div_rn(power, tl.zeros_like(power) + total)
                units = (part * _UNITS).to(tl.int64)
                mass += tl.where(bits < candidate, units, 0)
            likelier = tl.sum(mass, 1)[:, None].to(tl.float32) * (1.0 / _UNITS)
            is_within = (likelier < max_mass).to(tl.int32)
            # A top-p of 0 meets no pivot and keeps only the likeliest token.
            nucleus += (tl.maximum(tl.sum(is_within, 0) - 1, 0)[None, :]).to(tl.uint32) << shift
        limit = tl.minimum(limit, nucleus)
    tl.store(peaks + row, peak)
    tl.store(farthest + row, tl.max(limit.to(tl.int64)))


@triton.jit
def _scaled(logits, start, column, peak, divisor, VOCAB_SIZE: tl.constexpr):
    """Return a part of a row after temperature, and its ``distance_bits``."""
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
    row_mask = row < num_rows
    inside = row_mask & (column < VOCAB_SIZE)
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    peak = tl.load(peaks + row, mask=row_mask, other=0.0)
    limit = tl.load(farthest + row, mask=row_mask, other=0).to(tl.uint32)
    scaled = value - peak
    is_kept = distance_bits(scaled) <= limit
    if min_p is not None:
        ratio = tl.load(min_p + row, mask=row_mask, other=0.0).to(tl.float32)
        is_kept = is_kept & (scaled >= natural_log(ratio))
    value = tl.where(is_kept, value, float("-inf"))
    tl.store(y + row * VOCAB_SIZE + column, value.to(y.dtype.element_ty), mask=inside)


_LOGITS, _FLOATS, _LABEL = (FP32, 64, 128256), (FP32, 64), "64 rows of 128256"

BUILDS = (
    Build("mask_top_k_top_p_triton", _LABEL, given(_LOGITS, (INT64, 64), _FLOATS), "float32"),
    Build("mask_min_p_triton", _LABEL, given(_LOGITS, _FLOATS), "float32"),
)
