"""Noise that is a pure function of seed, step and token: no generator, no state.

A request's noise therefore does not depend on the batch around it, and every backend can compute
the same. Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd: multiples of it don't repeat
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_BITS = 40  # of each hash that are used; tokens less likely than 2^-40 are out of reach


def gumbel_noise(seeds: Tensor, steps: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return standard Gumbel noise, ``[B, V]``: g = -log(-log(1 - u)) in ``dtype``.

    u is ``uniform_noise``, the same in any dtype and on any device, so that two results differ by
    the rounding of the logarithms only. A large g comes from a small u, where floats are dense.

    Args:
        seeds: ``[B]`` int64.
        steps: ``[B]`` int64.
        num_tokens: V.
        dtype: float32 or float64.
    """
    return -torch.log(-torch.log1p(-uniform_noise(seeds, steps, num_tokens).to(dtype)))


def uniform_noise(seeds: Tensor, steps: Tensor, num_tokens: int) -> Tensor:
    """Return uniform noise in the open interval (0, 1), ``[B, V]`` float32, the same bits anywhere.

    With all integers modulo 2^64, c = 0x9E3779B97F4A7C15 and mix the finalizer of SplitMix64:

    key = mix(mix(seed) + (step + 1) c); hash = mix(key + (token + 1) c)
    u = min(float32((hash >> 24) | 1) 2^-40, 1 - 2^-24), rounded to nearest, ties to even

    Args:
        seeds: ``[B]`` int64.
        steps: ``[B]`` int64.
        num_tokens: V.
    Source: doi:10.1145/2660193.2660195 (SplitMix).
    """
    keys = _mix(_mix(seeds) + (steps + 1) * _GAMMA)
    # The mask changes nothing, but hides from inductor that these are the numbers of a loop. Of a
    # multiple of those it makes C++ that overflows, which is undefined and went beyond the end of
    # memory, or counts in steps of 32 bits (torch 2.13.0).
    tokens = torch.arange(1, num_tokens + 1, device=seeds.device) & 0x7FFFFFFF
    hashes = _mix(keys[:, None] + tokens * _GAMMA)
    odd = _shifted(hashes, 64 - _BITS) | 1
    return (odd.float() * 2.0**-_BITS).clamp(max=1 - 2.0**-24)


def _mix(x: Tensor) -> Tensor:
    """Return a bijection of 64-bit words in which every bit depends on every bit."""
    x = (x ^ _shifted(x, 30)) * _FACTORS[0]
    x = (x ^ _shifted(x, 27)) * _FACTORS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of an int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
