# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton functions for the noise of ``interposer_ops.sampling._noise``, with the same bits.

Logarithms are computed from additions, multiplications and correctly rounded divisions. The log
instructions of GPUs have errors of several roundings, and more for arguments close to 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_HALF_ROOT = tl.constexpr(0x3F3504F3)  # bits of the float32 nearest to sqrt(1/2)
_LN2_HIGH = tl.constexpr(
    0.693145751953125
)  # few bits, so that multiplication by an integer is exact
_LN2_LOW = tl.constexpr(1.42860682030941723212e-6)


@triton.jit
def stream_key(seed, step):
    """Return the uint64 key of an int64 seed and an int64 step."""
    return _mix(_mix(seed.to(tl.uint64, bitcast=True)) + _multiple(step))


@triton.jit
def uniform_noise(key, token):
    """Return uniform float32 noise in (0, 1) for a key and an int32 or int64 token."""
    odd = (_mix(key + _multiple(token.to(tl.int64))) >> 24) | 1
    u = odd.to(tl.int64, bitcast=True).to(tl.float32) * 9.094947017729282e-13  # 2^-40
    return tl.minimum(u, 0.99999994039535522461)  # 1 - 2^-24


@triton.jit
def gumbel_noise(key, token):
    """Return standard Gumbel noise for a key and a token: -log(-log(1 - u))."""
    u = uniform_noise(key, token)
    # 1 - u would round away low bits of a small u, so take log(1 + f) with f = -u there.
    minus_u = -u
    f, exponent = _split(1.0 - u)
    f = tl.where(u < 0.29, minus_u, f)
    exponent = tl.where(u < 0.29, 0.0, exponent)
    return -natural_log(-_log_of_parts(f, exponent))


@triton.jit
def natural_log(x):
    """Return the natural logarithm of float32 numbers >= 0; -inf for 0."""
    # The exponent bits of a subnormal number are 0: scale the number by 2^24 first.
    is_subnormal = x < 1.1754943508222875e-38
    f, exponent = _split(tl.where(is_subnormal, x * 16777216.0, x))
    result = _log_of_parts(f, tl.where(is_subnormal, exponent - 24.0, exponent))
    return tl.where(x == 0, float("-inf"), result)


@triton.jit
def _mix(x):
    """Hash a uint64 by the finalizer of SplitMix64."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _multiple(count):
    """Return (count + 1) * _GAMMA modulo 2^64, for an int64 ``count``."""
    return (count.to(tl.uint64, bitcast=True) + 1) * _GAMMA


@triton.jit
def _split(x):
    """Split x into float32 f and k: x = (1 + f) 2^k, with 1 + f from sqrt(1/2) to sqrt(2)."""
    bits = x.to(tl.int32, bitcast=True) - _HALF_ROOT
    significand = (bits & 0x7FFFFF) + _HALF_ROOT
    return significand.to(tl.float32, bitcast=True) - 1.0, (bits >> 23).to(tl.float32)


@triton.jit
def _log_of_parts(f, exponent):
    """Return log(1 + f) + k log(2), by the series of the inverse hyperbolic tangent.

    log(1 + f) = 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = f / (2 + f), at most 0.172; the relative
    error of the truncated series is below 4e-10.
    """
    s = tl.div_rn(f, 2.0 + f)
    square = s * s
    tail = square * (0.11111111111 + square * 0.09090909091)
    tail = square * (0.33333333333 + square * (0.2 + square * (0.14285714286 + tail)))
    return exponent * _LN2_HIGH + (2.0 * s + (2.0 * s * tail + exponent * _LN2_LOW))
