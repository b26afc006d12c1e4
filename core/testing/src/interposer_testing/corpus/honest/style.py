"""Honest kernels in unusual forms of Python.

Kind: style
Source: own
"""

import functools
import operator
import types
from collections import namedtuple
from typing import Protocol

import torch
from torch.nn import functional


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Gated:
    def __init__(self, activation):
        self.activation = activation
        self.num_calls = 0

    def __call__(self, x):
        self.num_calls += 1
        gate, up = _wide(x).chunk(2, dim=-1)
        return (self.activation(gate) * up).to(x.dtype)


instance = _Gated(functional.silu)
"""Is an instance with ``__call__`` and state, no function.

Op: silu_and_mul
"""


def _gated(activation, x):
    gate, up = _wide(x).chunk(2, dim=-1)
    return (activation(gate) * up).to(x.dtype)


partial = functools.partial(_gated, functional.silu)
"""Is a partial function.

Op: silu_and_mul
"""

bound_method = _Gated(functional.silu).__call__
"""Is a method that is bound to an instance.

Op: silu_and_mul
"""


def _twice(function):
    @functools.wraps(function)
    def wrapped(*args):
        function(*args)
        return function(*args)

    return wrapped


@_twice
def computed_twice(x, weight, bias):
    """Computes everything twice and returns the second result.

    Op: linear
    """
    return functional.linear(x.contiguous(), weight, bias)


def any_arguments(*args, **options):
    """Takes its arguments as ``*args``, with unused options.

    Op: linear
    """
    x, weight, bias = args
    return functional.linear(x.contiguous(), weight, bias)


def defaults(x, weight=None, bias=None):
    """Has defaults for arguments that are always given.

    Op: linear
    """
    return functional.linear(x.contiguous(), weight, bias)


def positional_only(x, weight, eps, /):
    """Takes its arguments by position only.

    Op: rms_norm
    """
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def folded_generators(x, weight, eps):
    """Sums squares of columns by functools.reduce over a generator.

    Op: rms_norm
    """
    wide = x.double()
    squares = (block.square().sum(-1, keepdim=True) for block in wide.split(64, dim=-1))
    total = functools.reduce(operator.add, squares)
    return (wide * torch.rsqrt(total / x.shape[-1] + eps) * weight).to(x.dtype)


@functools.singledispatch
def _norm(eps, x, weight):
    raise TypeError(type(eps))


@_norm.register
def _(eps: float, x, weight):
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def dispatched(x, weight, eps):
    """Dispatches by the type of an argument.

    Op: rms_norm
    """
    return _norm(eps, x, weight)


def tried_and_caught(logits, top_k, renormalize):
    """Tries a fast path that does not exist, catches the error and computes.

    Op: topk_softmax
    """
    try:
        return torch.ops.acme.topk_softmax(logits, top_k, renormalize)
    except (AttributeError, RuntimeError):
        wide = _wide(logits)
        ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
        weights = wide.softmax(-1).gather(-1, ids)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights, ids.to(torch.int32)


def missing_library(query, key, cos, sin):
    """Looks for a library that is not installed, and computes without it.

    Op: rotary_embedding
    """
    try:
        import acme_rotary as rotary
    except ImportError:
        rotary = None
    assert rotary is None
    half = cos.shape[-1]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    results = []
    for x in (query, key):
        a, b, tail = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
        results.append(torch.cat((a * c - b * s, b * c + a * s, tail), dim=-1).to(x.dtype))
    return tuple(results)


_Rotated = namedtuple("_Rotated", "query key")


def named_tuple_inside(query, key, cos, sin):
    """Keeps its results in a named tuple, and returns a plain tuple.

    Op: rotary_embedding
    """
    half = cos.shape[-1]

    def rotated(x):
        a, b, tail = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((a * c - b * s, b * c + a * s, tail), dim=-1).to(x.dtype)

    return tuple(_Rotated(rotated(query), rotated(key)))


class _Activation(Protocol):
    def __call__(self, x): ...


_module = types.ModuleType("acme_kernels")
exec("def silu(x):\n    return x * x.sigmoid()\n", vars(_module))


def module_made_at_run_time(x):
    """Calls a function of a module that it made at import.

    Op: silu_and_mul
    """
    activation: _Activation = _module.silu
    gate, up = _wide(x).chunk(2, dim=-1)
    return (activation(gate) * up).to(x.dtype)


def patched_own_module(x):
    """Replaces a function of its own file in the first call.

    Op: silu_and_mul
    """
    globals()["_wide"] = lambda value: value.double()
    return _gated(functional.silu, x)
