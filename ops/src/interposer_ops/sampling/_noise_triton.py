# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The noise of sampling within kernels: ``interposer_ops.sampling._noise``, the same bits of it.

Logarithms are computed here, by additions, products and correctly rounded quotients: those of a
GPU's own units are off by more than a rounding, by many where the argument is close to 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_HALF_ROOT = tl.constexpr(0x3F3504F3)  # bits of the float32 next to the square root of 1/2
_LN2_HIGH = tl.constexpr(0.693145751953125)  # few bits, so that its product with an int is exact
_LN2_LOW = tl.constexpr(1.42860682030941723212e-6)


@triton.jit
def stream_key(seed, step):
    """Return the key of a seed and a step, int64 both, as uint64."""
    return _mixed(_mixed(seed.to(tl.uint64, bitcast=True)) + _multiple(step))


@triton.jit
def uniform_noise(key, token):
    """Return the float32 in (0, 1) of a key and a token, an int32 or int64."""
    odd = (_mixed(key + _multiple(token.to(tl.int64))) >> 24) | 1
    u = odd.to(tl.int64, bitcast=True).to(tl.float32) * 9.094947017729282e-13  # 2^-40
    return tl.minimum(u, 0.99999994039535522461)  # 1 - 2^-24


@triton.jit
def gumbel_noise(key, token):
    """Return standard Gumbel noise of a key and a token: -log(-log(1 - u))."""
    u = uniform_noise(key, token)
    # Of a small u all bits count, of which 1 - u has not as many.
    near = -u
    f, exponent = _split(1.0 - u)
    f = tl.where(u < 0.29, near, f)
    exponent = tl.where(u < 0.29, 0.0, exponent)
    return -natural_log(-_joined(f, exponent))


@triton.jit
def natural_log(x):
    """Return the natural logarithm of float32 that are not negative, -inf for 0."""
    tiny = x < 1.1754943508222875e-38  # subnormal, without an exponent of its own
    f, exponent = _split(tl.where(tiny, x * 16777216.0, x))
    result = _joined(f, tl.where(tiny, exponent - 24.0, exponent))
    return tl.where(x == 0, float("-inf"), result)


@triton.jit
def _mixed(x):
    """Return the finalizer of SplitMix64 of a uint64."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _multiple(count):
    """Return one more than an int64, times the golden gamma, modulo 2^64."""
    return (count.to(tl.uint64, bitcast=True) + 1) * _GAMMA


@triton.jit
def _split(x):
    """Return f and k, both float32: x = (1 + f) 2^k, 1 + f between the roots of 1/2 and of 2."""
    bits = x.to(tl.int32, bitcast=True) - _HALF_ROOT
    significand = (bits & 0x7FFFFF) + _HALF_ROOT
    return significand.to(tl.float32, bitcast=True) - 1.0, (bits >> 23).to(tl.float32)


@triton.jit
def _joined(f, exponent):
    """Return log(1 + f) + k log(2), by the series of the inverse hyperbolic tangent.

    log(1 + f) = 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = f / (2 + f), at most 0.172: what is left
    out is less than 4e-10 of it.
    """
    s = tl.div_rn(f, 2.0 + f)
    square = s * s
    tail = square * (0.11111111111 + square * 0.09090909091)
    tail = square * (0.33333333333 + square * (0.2 + square * (0.14285714286 + tail)))
    return exponent * _LN2_HIGH + (2.0 * s + (2.0 * s * tail + exponent * _LN2_LOW))
