# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Masks, scores and the online softmax of a tile of queries and a tile of keys.

Called within kernels. Scores are to the base 2, so that exp2 takes them. Positions, prefixes and
windows count tokens of one sequence; ``window`` and ``prefix`` are None where there is none, and
``BOTH`` lets a window reach as far ahead as behind.

Dimensions: R rows of queries, L keys, E columns of values, B sequences.
Source: arXiv:1805.02867 (the running maximum and sum); arXiv:2205.14135 (over tiles).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST_SIDE = 16
"""The least elements of each side of what tl.dot multiplies."""
_AT_ONCE = tl.constexpr(256)  # starts that are compared with a token


@triton.jit
def seen(queries, keys, num_keys, window, prefix, CAUSAL: tl.constexpr, BOTH: tl.constexpr):
    """Return ``[R, L]``, whether a query sees a key, of positions ``[R, 1]`` and ``[1, L]``."""
    # Bounds of each query, which a loop over keys computes once: one comparison is left in it.
    start, end = seen_by_any(queries, queries, num_keys, window, prefix, CAUSAL, BOTH)
    if window is None:
        return keys < end
    # Without a sign, so that what is before the start is beyond the end.
    return (keys - start).to(tl.uint32) < tl.maximum(end - start, 0).to(tl.uint32)


@triton.jit
def seen_by_any(first, last, num_keys, window, prefix, CAUSAL: tl.constexpr, BOTH: tl.constexpr):
    """Return start and end of the keys that some query from ``first`` to ``last`` may see."""
    start, end = num_keys * 0, num_keys
    if CAUSAL:
        reached = last + 1
        if prefix is not None:
            reached = tl.where(first < prefix, tl.maximum(reached, prefix), reached)
        end = tl.minimum(end, reached)
    if window is not None:
        start = tl.maximum(start, first - window + 1)
        if BOTH:
            end = tl.minimum(end, last + window)
    return start, end


@triton.jit
def seen_by_all(first, last, num_keys, window, prefix, CAUSAL: tl.constexpr, BOTH: tl.constexpr):
    """Return start and end of keys that each query from ``first`` to ``last`` sees."""
    start, end = num_keys * 0, num_keys
    if CAUSAL:
        reached = first + 1
        if prefix is not None:
            reached = tl.where(last < prefix, tl.maximum(reached, prefix), reached)
        end = tl.minimum(end, reached)
    if window is not None:
        start = tl.maximum(start, last - window + 1)
        if BOTH:
            end = tl.minimum(end, first + window)
    return start, end


@triton.jit
def scored(products, scale, softcap, slopes, distance):
    """Return scores to the base 2 of ``q k^T``.

    Args:
        products: ``[R, L]`` float32.
        softcap: or None.
        slopes: ``[R, 1]`` float32, or None: what a token of ``distance`` costs.
        distance: ``[R, L]``, only read where there are slopes.
    """
    if softcap is None:
        scores = products * (scale * LOG2E)
    else:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1): no GPU has to know tanh, and what overflows gives 1.
        power = tl.exp2(products * (scale * (2 * LOG2E) / softcap))
        scores = (softcap * LOG2E) * (1.0 - 2.0 / (power + 1.0))
    if slopes is not None:
        scores = scores - (slopes * LOG2E) * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def joined(scores, values, largest, total, mixed):
    """Return the running maximum, sum and mixed values with those of one more tile.

    Args:
        scores: ``[R, L]`` float32 to the base 2, -inf where a key is not seen.
        values: ``[L, E]``, finite; weights are rounded to their dtype.
        largest, total: ``[R]`` float32; at first -inf and 0, or a sink to the base 2 and 1.
        mixed: ``[R, E]`` float32.
    """
    higher = tl.maximum(largest, tl.max(scores, 1))
    origin = tl.where(higher == float("-inf"), 0.0, higher)  # where nothing is seen so far
    weights = tl.exp2(scores - origin[:, None])
    kept = tl.exp2(largest - origin)
    total = total * kept + tl.sum(weights, 1)
    mixed = mixed * kept[:, None]
    mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def quotient(mixed, total):
    """Return ``[R, E]``, the mixed values over the sum of weights; zeros where nothing is seen."""
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def sequence_of(token, starts, num_sequences):
    """Return the number of the sequence that ``token`` is of, int32.

    Args:
        token: int64.
        starts: ``[B + 1]`` int64, ascending.
        num_sequences: B, at least 1.
    """
    ended = tl.zeros([_AT_ONCE], tl.int32)
    for first in range(0, num_sequences, _AT_ONCE):
        number = first + tl.arange(0, _AT_ONCE)
        end = tl.load(starts + 1 + number, mask=number < num_sequences, other=0)
        ended += ((number < num_sequences) & (end <= token)).to(tl.int32)
    return tl.minimum(tl.sum(ended, 0), num_sequences - 1)


@triton.jit
def context_of(token, sequence, starts, seq_lens):
    """Return how many cached tokens are no later than ``token``, itself included; int32.

    Args:
        token: int64; one of the newest tokens of ``sequence``, all of which are in the cache.
        starts: ``[B + 1]`` int64; where the newest tokens of each sequence begin.
        seq_lens: ``[B]`` int64; the tokens of a sequence in the cache.
    """
    later = tl.load(starts + sequence + 1) - token - 1
    return (tl.load(seq_lens + sequence) - later).to(tl.int32)
