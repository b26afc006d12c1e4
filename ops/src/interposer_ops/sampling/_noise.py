"""Counter-based random noise: a pure function of seed, step and token, without a generator.

So the noise of a request does not depend on the batch, and every backend can compute the same bits.

B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """Reinterpret an unsigned 64-bit integer as int64."""
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio; odd, so that multiples never repeat
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_BITS = 40  # used bits of a hash; tokens of probability below 2^-40 cannot be drawn


def gumbel_noise(seeds: Tensor, steps: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return standard Gumbel noise, ``[B, V]``: g = -log(-log(1 - u)) in ``dtype``.

    u is ``uniform_noise``, identical for every dtype and device, so that results differ only by the
    rounding of the logarithms. A large g comes from a small u, where floats are dense.

    Args:
        seeds: ``[B]`` int64.
        steps: ``[B]`` int64.
        num_tokens: V.
        dtype: float32 or float64.
    """
    return -torch.log(-torch.log1p(-uniform_noise(seeds, steps, num_tokens).to(dtype)))


def uniform_noise(seeds: Tensor, steps: Tensor, num_tokens: int) -> Tensor:
    """Return uniform noise in (0, 1), ``[B, V]`` float32, with the same bits on every device.

    With integers modulo 2^64, c = 0x9E3779B97F4A7C15 and mix the finalizer of SplitMix64:

    key = mix(mix(seed) + (step + 1) c); hash = mix(key + (token + 1) c)
    u = min(float32((hash >> 24) | 1) 2^-40, 1 - 2^-24), rounded to nearest, ties to even

    Args:
        seeds: ``[B]`` int64.
        steps: ``[B]`` int64.
        num_tokens: V.
    Source: doi:10.1145/2660193.2660195 (SplitMix).
    """
    keys = _mix(_mix(seeds) + (steps + 1) * _GAMMA)
    # The mask changes no value, but hides from inductor that ``tokens`` is a loop index. For a
    # multiple of a loop index, inductor (torch 2.13.0) generates C++ with a signed overflow, which
    # is undefined and accessed memory out of bounds, or counts in 32 bits.
    tokens = torch.arange(1, num_tokens + 1, device=seeds.device) & 0x7FFFFFFF
    hashes = _mix(keys[:, None] + tokens * _GAMMA)
    odd = _shift_right(hashes, 64 - _BITS) | 1
    return (odd.float() * 2.0**-_BITS).clamp(max=1 - 2.0**-24)


def _mix(x: Tensor) -> Tensor:
    """Hash 64-bit integers by the finalizer of SplitMix64, a bijection."""
    x = (x ^ _shift_right(x, 30)) * _FACTORS[0]
    x = (x ^ _shift_right(x, 27)) * _FACTORS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch shifts an int64 arithmetically, with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
