"""Cases of the activations, of single elements and gated. T tokens, I intermediate size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import dtype_name, normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, Special, peak, uniform

_SHAPES = {
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
# Where exponentials underflow and overflow, and where the forms of GELU differ.
_EXTREMES = (-1e3, -104.0, -88.5, -20.0, -3.0, -1e-3, -0.0, 0.0, 1e-3, 3.0, 20.0, 88.5, 1e3)
_FORMS = {"erf": {"approximate": "none"}, "tanh": {"approximate": "tanh"}}

# Largest numbers of either sign, or the numbers themselves. Those of the first kind leave no
# activation so small that it is lost beside 1, which would make its product with an infinity a
# matter of precision. The square of 200 is a finite float16.
_NUMBERS = {"": 4.0, "small": 1e-3, "large": 150.0, "extremes": _EXTREMES}
_SQUARED = {**_NUMBERS, "extremes": (-6e4, -0.0, 0.0, 200.0, 1e-7)}
_GATES = {"": 4.0, "small gates": 1e-3, "large gates": 150.0, "extreme gates": _EXTREMES}
_ORDINARY: tuple[Special, ...] = ("subnormals", "negative zeros")
# Whether a closed gate times an infinity is 0 or NaN depends on whether the product is taken, what
# is left of minus infinity on how an activation is computed, and the maximum of a number and a NaN
# is either, as the hardware has it.
_SMOOTH: tuple[Special, ...] = ("NaN", *_ORDINARY)
_SQUARES: tuple[Special, ...] = ("infinities", *_ORDINARY)
_PRODUCTS: tuple[Special, ...] = ("infinities", "NaN", *_ORDINARY)

_Options = Mapping[str, Any]
_Arranged = Callable[[Tensor, Tensor], Tensor]
_Bound = Callable[[float, float, _Options], float]


def _products(gate: float, up: float, _: _Options) -> float:
    """Bound gate times up.

    An activation takes about four float32 operations, and 1 + erf cancels down to the error of 1,
    so that the error is one of the gate times the other half.
    """
    return gate * up


def _nothing(_: float, __: float, ___: _Options) -> float:
    """Bound what multiplications in a row add up to: their errors are relative, and cancel none."""
    return 0.0


def _clamped(gate: float, up: float, options: _Options) -> float:
    """Bound the clamped gate times one more than the clamped other half.

    A gate below the clamp is not bounded, but what its error is relative to, gate * sigmoid, is at
    most 1 there for an alpha of at least 0.5.
    """
    limit = float(options["limit"])
    return max(1.0, min(limit, gate)) * (1 + min(limit, up))


def _gate_first(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((gate, up), dim=-1)


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), dim=-1).flatten(-2)


@dataclass(frozen=True)
class _Activation:
    """The arguments of one activation.

    Attributes:
        arranged: makes ``x`` of gates and what they gate; None of an activation of single elements.
        bound: of the magnitude of a case, by the largest gate, what it gates at most, and options.
        sampled: the options of the sample.
    """

    arranged: _Arranged | None
    bound: _Bound
    sampled: _Options

    def build(self, point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
        """Return the case of a point, what is gated drawn first."""
        shape, numbers = point["shape"], point["numbers"]
        up = None
        if self.arranged:
            high = 1.0 if isinstance(numbers, tuple) else 6.0
            up = uniform(shape, dtype, generator, -high, high)
        if isinstance(numbers, tuple):
            count = math.prod(shape)
            gate = torch.tensor(numbers).repeat(count // len(numbers) + 1)[:count]
            gate = gate.view(shape).to(dtype)
        else:
            gate = uniform(shape, dtype, generator, -numbers, numbers)
        return self.case(gate, up, point.values.get("options", {}))

    def sample(self, dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
        """Return T rows of the up projection, or of the merged gate and up projections."""
        generator = torch.Generator().manual_seed(seed)
        shape = (num_tokens, int(dims["intermediate_size"]))
        gate = normal_numbers(shape, dtype, generator, deviation=2.0)
        up = normal_numbers(shape, dtype, generator, deviation=2.0) if self.arranged else None
        options = {name: dims.get(name, value) for name, value in self.sampled.items()}
        return self.case(gate, up, options, f"{num_tokens} tokens")

    def case(self, gate: Tensor, up: Tensor | None, options: _Options, label: str = "") -> Case:
        """Return the case of a gate and what it gates.

        An activation that is held in the storage dtype among the subnormal numbers is rounded like
        the smallest normal one, before it is multiplied.
        """
        x, largest, rounded = gate, 1.0, 0.0
        if self.arranged and up is not None:
            x, largest = self.arranged(gate, up), peak(up)
            rounded = torch.finfo(gate.dtype).smallest_normal * (1 + largest)
        return Case(
            label,
            {"x": x, **options},
            # Forms are stated, numbers are not.
            {
                "intermediate_size": gate.shape[-1],
                **{name: value for name, value in options.items() if isinstance(value, str)},
            },
            # A square alone is one multiplication.
            reduction=1 if self.bound is _nothing and up is None else 4,
            magnitude=self.bound(peak(gate), largest, options),
            rounded=rounded,
        )


_Sample = Callable[[torch.dtype, Dims, int, int], Case]


def _activation(
    arranged: _Arranged | None = _gate_first, bound: _Bound = _products,
    numbers: Mapping[str, Any] = _GATES, special: tuple[Special, ...] = _PRODUCTS,
    options: Mapping[str, _Options] | None = None, crossed_options: tuple[str, ...] = (),
    **sampled: Any,
) -> tuple[CaseSpace, _Sample]:  # fmt: skip
    """Return the cases and the sample of an activation."""
    activation = _Activation(arranged, bound, sampled)
    space = CaseSpace(
        activation.build,
        Axis("shape", _SHAPES),
        Axis("numbers", numbers),
        *([Axis("options", options)] if options else []),
        strided={"x": "leading"},
        special={"x": special},
        crossed={
            "shape": ("many rows", "one row", "odd width", "a few elements", "three dimensions"),
            "numbers": ("",),
            **({"options": crossed_options} if crossed_options else {}),
        },
        alone={"shape": ("no rows",)},
    )
    return space, activation.sample


# Rows of several shapes and magnitudes, which for a square is finite.
quick_gelu_cases, quick_gelu_sample = _activation(None, _products, _NUMBERS, _SMOOTH)
relu2_cases, relu2_sample = _activation(None, _nothing, _SQUARED, _SQUARES)
gelu_cases, gelu_sample = _activation(
    None, _products, _NUMBERS, _SMOOTH, options=_FORMS, approximate="tanh"
)

# Rows of several shapes, and gates at which exponentials leave the float range.
silu_and_mul_cases, silu_and_mul_sample = _activation()
gelu_and_mul_cases, gelu_and_mul_sample = _activation(options=_FORMS, approximate="tanh")

_FORMATS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}


def _quantized(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, high = point["shape"], point["numbers"]
    gate, up = (uniform(shape, dtype, generator, -limit, limit) for limit in (high, 6.0))
    scale = torch.tensor([max(high, 1.0) * 6 / torch.finfo(point["format"]).max * point["share"]])
    return _quantized_case(gate, up, scale, point["format"])


def _quantized_case(
    gate: Tensor, up: Tensor, scale: Tensor, out_dtype: torch.dtype, label: str = ""
) -> Case:
    """Return the case with zeros for what is gated where float32 could round either way."""
    largest = torch.finfo(out_dtype).max
    exact = torch.nn.functional.silu(gate.double()) * up.double() / scale.double()
    # Far more than four operations of float32 and an approximate exponential are wrong by.
    below, above = (
        (exact * (1 + side)).clamp(-largest, largest).to(out_dtype).double()
        for side in (-(2.0**-16), 2.0**-16)
    )
    up = up.masked_fill(below != above, 0.0)
    arguments = {"x": _gate_first(gate, up), "scale": scale, "out_dtype": out_dtype}
    dims: Dims = {"intermediate_size": gate.shape[-1], "out_dtype": dtype_name(out_dtype)}
    return Case(label, arguments, dims, reduction=0, magnitude=0.0)


silu_and_mul_quantize_fp8_cases = CaseSpace(
    _quantized,
    Axis("shape", _SHAPES),
    Axis("format", _FORMATS),
    Axis("numbers", {"": 4.0, "small gates": 1e-3, "large gates": 30.0, "zeros": 0.0}),
    Axis("share", {"": 0.9, "saturating": 0.1}),
    strided={"x": "leading", "scale": "offset"},
    crossed={
        "shape": ("many rows", "odd width", "three dimensions"),
        "format": ("e4m3",),
        "numbers": ("",),
        "share": ("",),
    },
    alone={"shape": ("no rows",)},
)
"""Rows of several shapes whose results are spread over and beyond each format's range."""


def silu_and_mul_quantize_fp8_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return T rows of the merged projections and a scale at which hardly any saturate."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["intermediate_size"]))
    gate, up = (normal_numbers(shape, dtype, generator, deviation=2.0) for _ in range(2))
    out_dtype = getattr(torch, str(dims.get("out_dtype", "float8_e4m3fn")))
    scale = torch.tensor([20 / torch.finfo(out_dtype).max])
    return _quantized_case(gate, up, scale, out_dtype, f"{num_tokens} tokens")


# Limits that few and many gates exceed; samples have those of gpt-oss and of DeepSeek-V4.
swiglu_oai_and_mul_cases, swiglu_oai_and_mul_sample = _activation(
    _interleaved,
    _clamped,
    special=_ORDINARY,
    options={
        "": {"alpha": 1.702, "limit": 7.0},
        "tight limit": {"alpha": 1.702, "limit": 0.5},
        "SiLU": {"alpha": 1.0, "limit": 7.0},
    },
    crossed_options=("",),
    alpha=1.702,
    limit=7.0,
)
