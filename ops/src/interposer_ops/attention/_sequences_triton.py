# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Where a token stands among sequences whose tokens follow each other. Called within kernels.

B sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

_AT_ONCE = tl.constexpr(256)  # starts that are compared with a token


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
