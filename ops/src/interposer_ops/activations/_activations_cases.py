"""Test cases of the elementwise and gated activations.

T tokens, I intermediate size.
"""

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
# Numbers at which exponentials underflow and overflow, and at which the forms of GELU differ.
_EXTREMES = (-1e3, -104.0, -88.5, -20.0, -3.0, -1e-3, -0.0, 0.0, 1e-3, 3.0, 20.0, 88.5, 1e3)
_FORMS = {"erf": {"approximate": "none"}, "tanh": {"approximate": "tanh"}}

# The largest magnitude, or the numbers themselves. A magnitude is small enough that no activation
# underflows, since the product of an underflowed activation and an infinity would depend on the
# kernel's precision. The square of 200 is a finite float16.
_NUMBERS = {"": 4.0, "small": 1e-3, "large": 150.0, "extremes": _EXTREMES}
_SQUARED = {**_NUMBERS, "extremes": (-6e4, -0.0, 0.0, 200.0, 1e-7)}
_GATES = {"": 4.0, "small gates": 1e-3, "large gates": 150.0, "extreme gates": _EXTREMES}
_ORDINARY: tuple[Special, ...] = ("subnormals", "negative zeros")
# Special values without a single correct result are left out: a closed gate times an infinity is 0
# or NaN, depending on the kernel; so is a smooth activation of minus infinity; and the maximum of a
# number and a NaN depends on the hardware.
_SMOOTH: tuple[Special, ...] = ("NaN", *_ORDINARY)
_SQUARES: tuple[Special, ...] = ("infinities", *_ORDINARY)
_PRODUCTS: tuple[Special, ...] = ("infinities", "NaN", *_ORDINARY)

_Options = Mapping[str, Any]
_Arrange = Callable[[Tensor, Tensor], Tensor]
_Bound = Callable[[float, float, _Options], float]


def _product(gate: float, up: float, _: _Options) -> float:
    """Return the magnitude of gated results: the largest gate times the largest up element.

    An activation takes about four float32 operations. 1 + erf may cancel and leave the absolute
    error of 1, so that the error is relative to gate * up, not to the result.
    """
    return gate * up


def _no_magnitude(_: float, __: float, ___: _Options) -> float:
    """Return a magnitude of 0: multiplications alone have errors relative to the result."""
    return 0.0


def _clamped_product(gate: float, up: float, options: _Options) -> float:
    """Return the magnitude of swiglu_oai results: clamped gate times (1 + clamped up element).

    A negative gate has no lower limit, but there the error is relative to gate * sigmoid, which is
    at most 1 for an alpha of at least 0.5.
    """
    limit = float(options["limit"])
    return max(1.0, min(limit, gate)) * (1 + min(limit, up))


def _gate_first(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((gate, up), dim=-1)


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), dim=-1).flatten(-2)


@dataclass(frozen=True)
class _Activation:
    """Builder of the cases of one activation.

    Attributes:
        arrange: combines gates and up elements into ``x``; None for an elementwise activation.
        magnitude: returns the magnitude of a case from the largest gate, the largest up element and
            the options.
        sample_options: the options of the sample.
    """

    arrange: _Arrange | None
    magnitude: _Bound
    sample_options: _Options

    def build(self, point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
        """Build the case of a test point; up elements are drawn before gates."""
        shape, numbers = point["shape"], point["numbers"]
        up = None
        if self.arrange:
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
        """Make T rows of the up projection, or of the merged gate and up projections."""
        generator = torch.Generator().manual_seed(seed)
        shape = (num_tokens, int(dims["intermediate_size"]))
        gate = normal_numbers(shape, dtype, generator, deviation=2.0)
        up = normal_numbers(shape, dtype, generator, deviation=2.0) if self.arrange else None
        options = {name: dims.get(name, value) for name, value in self.sample_options.items()}
        return self.case(gate, up, options, f"{num_tokens} tokens")

    def case(self, gate: Tensor, up: Tensor | None, options: _Options, label: str = "") -> Case:
        """Build the case of gates and up elements.

        A kernel may round the activation to the storage dtype before the multiplication; subnormal
        activations then have the absolute error of the smallest normal number.
        """
        x, largest, rounded = gate, 1.0, 0.0
        if self.arrange and up is not None:
            x, largest = self.arrange(gate, up), peak(up)
            rounded = torch.finfo(gate.dtype).smallest_normal * (1 + largest)
        return Case(
            label,
            {"x": x, **options},
            # Dims state the form of an activation, but not numeric options.
            {
                "intermediate_size": gate.shape[-1],
                **{name: value for name, value in options.items() if isinstance(value, str)},
            },
            # ``relu2`` is one multiplication.
            reduction=1 if self.magnitude is _no_magnitude and up is None else 4,
            magnitude=self.magnitude(peak(gate), largest, options),
            rounded=rounded,
        )


_Sample = Callable[[torch.dtype, Dims, int, int], Case]


def _activation(
    arrange: _Arrange | None = _gate_first, magnitude: _Bound = _product,
    numbers: Mapping[str, Any] = _GATES, special: tuple[Special, ...] = _PRODUCTS,
    options: Mapping[str, _Options] | None = None, crossed_options: tuple[str, ...] = (),
    **sample_options: Any,
) -> tuple[CaseSpace, _Sample]:  # fmt: skip
    """Return the case space and the sample function of an activation."""
    activation = _Activation(arrange, magnitude, sample_options)
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


# Rows of several shapes and magnitudes; squares are finite.
quick_gelu_cases, quick_gelu_sample = _activation(None, _product, _NUMBERS, _SMOOTH)
relu2_cases, relu2_sample = _activation(None, _no_magnitude, _SQUARED, _SQUARES)
gelu_cases, gelu_sample = _activation(
    None, _product, _NUMBERS, _SMOOTH, options=_FORMS, approximate="tanh"
)

# Rows of several shapes, and gates at which exponentials underflow and overflow.
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
    """Build the case of an activation that quantizes; results stay clear of rounding boundaries."""
    largest = torch.finfo(out_dtype).max
    exact = torch.nn.functional.silu(gate.double()) * up.double() / scale.double()
    # The margin is far above the error of four float32 operations and an approximate exponential.
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
"""Rows of several shapes with results within and above each format's range."""


def silu_and_mul_quantize_fp8_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Make T rows of the merged projections and a scale at which hardly any result saturates."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["intermediate_size"]))
    gate, up = (normal_numbers(shape, dtype, generator, deviation=2.0) for _ in range(2))
    out_dtype = getattr(torch, str(dims.get("out_dtype", "float8_e4m3fn")))
    scale = torch.tensor([20 / torch.finfo(out_dtype).max])
    return _quantized_case(gate, up, scale, out_dtype, f"{num_tokens} tokens")


# Limits that few and many gates exceed; samples have the limits of gpt-oss and DeepSeek-V4.
swiglu_oai_and_mul_cases, swiglu_oai_and_mul_sample = _activation(
    _interleaved,
    _clamped_product,
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
