"""Cases of the activations of single elements. T tokens, I intermediate size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, Special, peak, uniform

SHAPES = {
    "many rows": (33, 128),
    "one row": (1, 64),
    "odd width": (5, 63),
    "a few elements": (3, 5),
    "one element": (1, 1),
    "no rows": (0, 32),
    "three dimensions": (2, 3, 48),
    "wide": (2, 2051),
    "width after a power of two": (3, 257),
}
"""By label, ``[..., I]``."""

FORMS = {"erf": "none", "tanh": "tanh"}
"""Of GELU."""

# Where exponentials underflow and overflow, and where the forms of GELU differ.
EXTREMES = (-1e3, -104.0, -88.5, -20.0, -3.0, -1e-3, -0.0, 0.0, 1e-3, 3.0, 20.0, 88.5, 1e3)
"""Gates at which an activation is hard to compute."""

_VALUES = {"": 4.0, "small": 1e-3, "large": 150.0, "extremes": EXTREMES}
# The square of 200 is a finite float16.
_SQUARES = {"": 4.0, "small": 1e-3, "large": 150.0, "extremes": (-6e4, -0.0, 0.0, 200.0, 1e-7)}

# What is left of minus infinity depends on how an activation is computed, and the maximum of a
# number and a NaN is either, as the hardware has it.
_SMOOTH: tuple[Special, ...] = ("NaN", "subnormals", "negative zeros")
_PIECEWISE: tuple[Special, ...] = ("infinities", "subnormals", "negative zeros")


def _elements(
    point: Point,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    options: Mapping[str, str],
    power: int,
) -> Case:
    values = point["values"]
    if isinstance(values, float):
        x = uniform(point["shape"], dtype, generator, -values, values)
    else:
        count = torch.empty(point["shape"]).numel()
        x = torch.tensor(values).repeat(count // len(values) + 1)[:count]
        x = x.view(point["shape"]).to(dtype)
    return _case({"x": x} | {name: point[axis] for name, axis in options.items()}, power)


def _space(*axes: Axis, power: int = 1, **options: str) -> CaseSpace:
    return CaseSpace(
        partial(_elements, options=options, power=power),
        Axis("shape", SHAPES),
        Axis("values", _VALUES if power == 1 else _SQUARES),
        *axes,
        strided={"x": "rows"},
        special={"x": _SMOOTH if power == 1 else _PIECEWISE},
        crossed={
            "shape": ("many rows", "one row", "odd width", "a few elements", "three dimensions"),
            "values": ("",),
        },
        alone={"shape": ("no rows",)},
    )


gelu_cases = _space(Axis("form", FORMS), approximate="form")
"""Rows of several shapes and magnitudes, for both forms of GELU."""

quick_gelu_cases = _space()
"""Rows of several shapes and magnitudes."""

relu2_cases = _space(power=2)
"""Rows of several shapes and magnitudes whose squares are finite."""


def gelu_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the up projection and the form of GELU that most models use."""
    x = _sampled(dtype, dims, num_tokens, seed)
    return _case({"x": x, "approximate": "tanh"}, 1, f"{num_tokens} tokens")


def quick_gelu_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the up projection."""
    return _case({"x": _sampled(dtype, dims, num_tokens, seed)}, 1, f"{num_tokens} tokens")


def relu2_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the up projection."""
    return _case({"x": _sampled(dtype, dims, num_tokens, seed)}, 2, f"{num_tokens} tokens")


def _sampled(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["intermediate_size"]))
    return normal_numbers(shape, dtype, generator, deviation=2.0)


def _case(arguments: dict[str, Any], power: int, label: str = "") -> Case:
    """Return the case of ``x``.

    An activation takes about four float32 operations, and 1 + erf cancels down to the error of 1,
    so that the error is one of x. A square is one multiplication, whose error is relative.
    """
    x: torch.Tensor = arguments["x"]
    dims = {"intermediate_size": x.shape[-1]}
    if power == 2:
        return Case(label, arguments, dims, reduction=1, magnitude=0.0)
    return Case(label, arguments, dims, reduction=4, magnitude=peak(x))
