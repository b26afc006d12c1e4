"""Cases of the gated activations. T tokens, I intermediate size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.activations._activations_cases import EXTREMES, FORMS, SHAPES
from interposer_testing.cases import Axis, CaseSpace, Point, Special, peak, uniform

# A kernel that compares with less or equal differs from one that compares with less at 0.5, and the
# threshold is one of every float type.
_NEAR_THRESHOLD = (-1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 0.50390625, 0.75, 2.0)
# Largest gates of either sign. Those of the first kind leave no activation so small that it is lost
# beside 1, which would make its product with an infinity a matter of precision.
_GATES = {"": 4.0, "small gates": 1e-3, "large gates": 150.0, "extreme gates": EXTREMES}
_SQUARED_GATES = {
    "": 4.0,
    "small gates": 1e-3,
    "large gates": 90.0,
    "extreme gates": (-6e4, -0.0, 0.0, 1e-7, 200.0),  # the square of 200 is a finite float16
}
_THRESHOLD_GATES = {"": 4.0, "small gates": 1e-3, "gates at the threshold": _NEAR_THRESHOLD}
# The maximum of a number and a NaN is either, as the hardware has it, and whether a closed gate
# times an infinity is 0 or NaN depends on whether the product is taken.
_SMOOTH: dict[str, tuple[Special, ...]] = {
    "x": ("infinities", "NaN", "subnormals", "negative zeros")
}
_PIECEWISE: dict[str, tuple[Special, ...]] = {"x": ("subnormals", "negative zeros")}

_Arranged = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Bound = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], float]


def _gate_first(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat((gate, up), dim=-1)


def _gate_last(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat((up, gate), dim=-1)


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack((gate, up), dim=-1).flatten(-2)


def _products(gate: torch.Tensor, up: torch.Tensor, _: dict[str, Any]) -> float:
    """Bound gate times up.

    An activation takes about four float32 operations, and 1 + erf cancels down to the error of 1,
    so that the error is one of the gate times the other half.
    """
    return peak(gate) * peak(up)


def _nothing(_: torch.Tensor, __: torch.Tensor, ___: dict[str, Any]) -> float:
    """Bound what multiplications in a row add up to: their errors are relative, and cancel none."""
    return 0.0


def _clamped(gate: torch.Tensor, up: torch.Tensor, options: dict[str, Any]) -> float:
    """Bound the clamped gate times one more than the clamped other half.

    A gate below the clamp is not bounded, but what its error is relative to, gate * sigmoid, is at
    most 1 there for an alpha of at least 0.5.
    """
    limit = float(options["limit"])
    return max(1.0, min(limit, peak(gate))) * (1 + min(limit, peak(up)))


def _gated(
    point: Point,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    arranged: _Arranged,
    bound: _Bound,
) -> Case:
    shape, gates = point["shape"], point["gates"]
    if isinstance(gates, tuple):
        up = uniform(shape, dtype, generator)
        gate = torch.tensor(gates).repeat(up.numel() // len(gates) + 1)[: up.numel()]
        gate = gate.view(shape).to(dtype)
    else:
        up = uniform(shape, dtype, generator, -6, 6)
        gate = uniform(shape, dtype, generator, -gates, gates)
    options = point.values.get("options", {})
    return _case(gate, up, options, arranged, bound)


def _space(
    options: dict[str, dict[str, Any]] | None = None,
    arranged: _Arranged = _gate_first,
    bound: _Bound = _products,
    gates: dict[str, Any] | None = None,
    special: dict[str, tuple[Special, ...]] | None = None,
    crossed_options: tuple[str, ...] = (),
) -> CaseSpace:
    return CaseSpace(
        partial(_gated, arranged=arranged, bound=bound),
        Axis("shape", SHAPES),
        Axis("gates", gates or _GATES),
        *([Axis("options", options)] if options else []),
        strided={"x": "rows"},
        special=_SMOOTH if special is None else special,
        crossed={
            "shape": ("many rows", "one row", "odd width", "a few elements", "three dimensions"),
            "gates": ("",),
            **({"options": crossed_options} if crossed_options else {}),
        },
        alone={"shape": ("no rows",)},
    )


silu_and_mul_cases = _space()
"""Rows of several shapes and gates at which exponentials leave the float range."""

gelu_and_mul_cases = _space({form: {"approximate": name} for form, name in FORMS.items()})
"""The rows of ``silu_and_mul`` for both forms of GELU."""

mul_and_silu_cases = _space(arranged=_gate_last)
"""The rows of ``silu_and_mul`` with the gates in the second half."""

relu2_and_mul_cases = _space(bound=_nothing, gates=_SQUARED_GATES, special=_PIECEWISE)
"""Rows of several shapes and gates whose squares are finite."""

fatrelu_and_mul_cases = _space(
    {"threshold 0.5": {"threshold": 0.5}, "threshold 0": {"threshold": 0.0}},
    bound=_nothing,
    gates=_THRESHOLD_GATES,
    special=_PIECEWISE,
)
"""Rows of several shapes and gates, some of which are the threshold itself."""

swiglu_oai_and_mul_cases = _space(
    {
        "": {"alpha": 1.702, "limit": 7.0},
        "tight limit": {"alpha": 1.702, "limit": 0.5},
        "SiLU": {"alpha": 1.0, "limit": 7.0},
    },
    arranged=_interleaved,
    bound=_clamped,
    special=_PIECEWISE,
    crossed_options=("",),
)
"""The gates of ``silu_and_mul``, interleaved, and limits that few and many of them exceed."""

swiglu_clamped_and_mul_cases = _space(
    {"": {"limit": 10.0}, "tight limit": {"limit": 0.5}},
    bound=_clamped,
    special=_PIECEWISE,
    crossed_options=("",),
)
"""The rows of ``silu_and_mul``, and limits that few and many of them exceed."""


def silu_and_mul_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the merged gate and up projections."""
    return _sample(dtype, dims, num_tokens, seed)


def gelu_and_mul_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return the sample of ``silu_and_mul`` for the form of GELU that most models use."""
    return _sample(dtype, dims, num_tokens, seed, {"approximate": "tanh"})


def mul_and_silu_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the merged up and gate projections."""
    return _sample(dtype, dims, num_tokens, seed, arranged=_gate_last)


def relu2_and_mul_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return the sample of ``silu_and_mul``."""
    return _sample(dtype, dims, num_tokens, seed, bound=_nothing)


def fatrelu_and_mul_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return the sample of ``silu_and_mul`` with a threshold that all float types have."""
    return _sample(dtype, dims, num_tokens, seed, {"threshold": 0.5}, bound=_nothing)


def swiglu_oai_and_mul_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the interleaved projections, with the options of gpt-oss."""
    options = {"alpha": 1.702, "limit": 7.0}
    return _sample(dtype, dims, num_tokens, seed, options, _interleaved, _clamped)


def swiglu_clamped_and_mul_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return the sample of ``silu_and_mul`` with the limit of DeepSeek-V4."""
    return _sample(dtype, dims, num_tokens, seed, {"limit": 10.0}, bound=_clamped)


def _sample(
    dtype: torch.dtype,
    dims: Dims,
    num_tokens: int,
    seed: int,
    options: dict[str, Any] | None = None,
    arranged: _Arranged = _gate_first,
    bound: _Bound = _products,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["intermediate_size"]))
    gate, up = (normal_numbers(shape, dtype, generator, deviation=2.0) for _ in range(2))
    return _case(gate, up, options or {}, arranged, bound, f"{num_tokens} tokens")


def _case(
    gate: torch.Tensor,
    up: torch.Tensor,
    options: dict[str, Any],
    arranged: _Arranged,
    bound: _Bound,
    label: str = "",
) -> Case:
    """Return the case of a gate and what it gates.

    An activation that is held in the storage dtype among the subnormal numbers is rounded like the
    smallest normal one, before it is multiplied.
    """
    dims = {"intermediate_size": gate.shape[-1]}
    return Case(
        label,
        {"x": arranged(gate, up), **options},
        dims,
        reduction=4,
        magnitude=bound(gate, up, options),
        rounded=torch.finfo(gate.dtype).smallest_normal * (1 + peak(up)),
    )
