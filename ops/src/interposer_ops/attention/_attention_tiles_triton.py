# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Masks, scores and the online softmax of a tile of queries and a tile of keys.

Functions called by kernels. Scores are scaled by log2(e), so that exp2 replaces exp. Positions,
prefixes and windows count tokens of one sequence; ``window`` and ``prefix`` are None if absent.
``BOTH`` makes a window symmetric: as many tokens ahead as back.

Dimensions: R rows of queries, L keys, E columns of values, B sequences.
Source: arXiv:1805.02867 (running maximum and sum); arXiv:2205.14135 (over tiles).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MIN_TILE_SIDE = 16
"""Smallest size of each dimension of a tl.dot operand."""
_STARTS_PER_STEP = tl.constexpr(256)  # sequence starts compared with a token in one step


@triton.jit
def is_visible(queries, keys, num_keys, window, prefix, CAUSAL: tl.constexpr, BOTH: tl.constexpr):
    """Return the mask ``[R, L]`` of keys at ``[1, L]`` that queries at ``[R, 1]`` may see."""
    # The bounds of each query do not depend on the keys: the compiler hoists them out of the loop
    # over keys, which keeps one comparison.
    start, end = keys_of_any(queries, queries, num_keys, window, prefix, CAUSAL, BOTH)
    if window is None:
        return keys < end
    # As unsigned numbers, keys before the start wrap around to beyond the end: one comparison.
    return (keys - start).to(tl.uint32) < tl.maximum(end - start, 0).to(tl.uint32)


@triton.jit
def keys_of_any(first, last, num_keys, window, prefix, CAUSAL: tl.constexpr, BOTH: tl.constexpr):
    """Return start and end of the range of keys that any query in [first, last] may see."""
    start, end = num_keys * 0, num_keys
    if CAUSAL:
        causal_end = last + 1
        if prefix is not None:
            causal_end = tl.where(first < prefix, tl.maximum(causal_end, prefix), causal_end)
        end = tl.minimum(end, causal_end)
    if window is not None:
        start = tl.maximum(start, first - window + 1)
        if BOTH:
            end = tl.minimum(end, last + window)
    return start, end


@triton.jit
def keys_of_all(first, last, num_keys, window, prefix, CAUSAL: tl.constexpr, BOTH: tl.constexpr):
    """Return start and end of the range of keys that every query in [first, last] sees."""
    # Of these keys, the last query bounds the start and the first query the end.
    return keys_of_any(last, first, num_keys, window, prefix, CAUSAL, BOTH)


@triton.jit
def attention_scores(raw_scores, scale, softcap, slopes, distance):
    """Turn ``q k^T`` into scores in base 2: scale, optional softcap, optional ALiBi.

    Args:
        raw_scores: ``[R, L]`` float32.
        softcap: bound of the scores, or None.
        slopes: ``[R, 1]`` float32, or None: the ALiBi slope of each row.
        distance: ``[R, L]`` tokens, read only if there are slopes.
    """
    if softcap is None:
        scores = raw_scores * (scale * LOG2E)
    else:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) needs no tanh instruction; an overflow of exp gives 1.
        power = tl.exp2(raw_scores * (scale * (2 * LOG2E) / softcap))
        scores = (softcap * LOG2E) * (1.0 - 2.0 / (power + 1.0))
    if slopes is not None:
        scores = scores - (slopes * LOG2E) * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def accumulate_tile(scores, values, largest, total, mixed):
    """Add one tile of keys to the online softmax; return the new maximum, sum and accumulator.

    Args:
        scores: ``[R, L]`` float32 in base 2, -inf for masked keys.
        values: ``[L, E]``, finite; softmax weights are rounded to the dtype of the values.
        largest, total: ``[R]`` float32; initially -inf and 0, or the sink in base 2 and 1.
        mixed: ``[R, E]`` float32, accumulator of weighted values.
    """
    higher = tl.maximum(largest, tl.max(scores, 1))
    # -inf - -inf is NaN, so rows without a visible key so far subtract 0 instead.
    origin = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(largest - origin)
    total = total * decay + tl.sum(weights, 1)
    mixed = mixed * decay[:, None]
    mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def normalise(mixed, total):
    """Divide the accumulator ``[R, E]`` by the sums of weights; zeros if no key is visible."""
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def sequence_of(token, starts, num_sequences):
    """Return the index of the sequence that contains ``token``, int32.

    Args:
        token: int64.
        starts: ``[B + 1]`` int64, ascending.
        num_sequences: B, at least 1.
    """
    # The index is the number of sequences that end at or before the token.
    ended = tl.zeros([_STARTS_PER_STEP], tl.int32)
    for first in range(0, num_sequences, _STARTS_PER_STEP):
        number = first + tl.arange(0, _STARTS_PER_STEP)
        end = tl.load(starts + 1 + number, mask=number < num_sequences, other=0)
        ended += ((number < num_sequences) & (end <= token)).to(tl.int32)
    return tl.minimum(tl.sum(ended, 0), num_sequences - 1)


@triton.jit
def context_of(token, sequence, starts, seq_lens):
    """Return the number of cached tokens up to and including ``token``, int32.

    Args:
        token: int64; one of the newest tokens of ``sequence``, all of which are in the cache.
        starts: ``[B + 1]`` int64; the first of the newest tokens of each sequence.
        seq_lens: ``[B]`` int64; tokens of each sequence in the cache.
    """
    later = tl.load(starts + sequence + 1) - token - 1
    return (tl.load(seq_lens + sequence) - later).to(tl.int32)
