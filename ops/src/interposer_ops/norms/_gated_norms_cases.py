"""Cases of the gated norm. T tokens, H hidden size."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.norms._norms_cases import norm_weight, rms_peak
from interposer_testing.cases import Axis, CaseSpace, Point, normal, peak

_EPS = 1e-5
_TOKENS = {"": (17,), "one row": (1,), "three dimensions": (2, 3), "no rows": (0,)}
# Hidden size and group size.
_GROUPS = {
    "one group": (128, 128),
    "four groups": (128, 32),
    "odd groups": (63, 21),
    "groups of one": (16, 1),
    "wide groups": (2050, 1025),
}
# Deviation of x, deviation and mean of the gates. Closed gates leave less than eps.
_VALUES = {
    "": (1.0, 2.0, 0.0),
    "zeros": (0.0, 2.0, 0.0),
    "large": (3e3, 1.0, 0.0),
    "open gates": (1.0, 5.0, 30.0),
    "closed gates": (1.0, 5.0, -30.0),
    "exponentials overflow": (1.0, 60.0, -60.0),
}
_ORDERS = {"": False, "norm first": True}


def _gated_rms_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    hidden_size, group_size = point["groups"]
    deviation, spread, mean = point["values"]
    shape = (*point["tokens"], hidden_size)
    x = normal(shape, dtype, generator, deviation)
    gate = (mean + normal(shape, torch.float32, generator, spread)).to(dtype)
    weight = norm_weight(hidden_size, dtype, generator)
    return _case(x, gate, weight, group_size, point["order"])


gated_rms_norm_cases = CaseSpace(
    _gated_rms_norm,
    Axis("tokens", _TOKENS),
    Axis("groups", _GROUPS),
    Axis("values", _VALUES),
    Axis("order", _ORDERS),
    strided={"x": "rows", "gate": "rows", "weight": "offset"},
    special={
        "x": ("infinities", "subnormals"),
        "gate": ("NaN", "negative zeros"),
    },
    crossed={
        "tokens": ("", "three dimensions"),
        "groups": ("four groups", "odd groups"),
        "values": ("",),
    },
    alone={"tokens": ("no rows",)},
    # One row differs from many in how it is split, which values have no part in.
    valid=lambda point, _: point.labels["tokens"] == "" or not point.labels["values"],
)
"""Groups of several sizes, gates that open, close and overflow, in both orders."""


def gated_rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows and their gates; one group and the gate first, unless the dims say more."""
    generator = torch.Generator().manual_seed(seed)
    hidden_size = int(dims["hidden_size"])
    weight = norm_weight(hidden_size, dtype, generator)
    x, gate = (
        normal_numbers((num_tokens, hidden_size), dtype, generator, deviation)
        for deviation in (1.0, 2.0)
    )
    group_size = int(dims.get("group_size", hidden_size))
    first = bool(dims.get("norm_before_gate", False))
    return _case(x, gate, weight, group_size, first, f"{num_tokens} tokens")


def _case(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    group_size: int,
    norm_before_gate: bool,
    label: str = "",
) -> Case:
    """Return the case of ``x``.

    Squares are positive, so the error of their sum shows as a relative one of the result; SiLU
    adds four operations, and an exponential's error of |gate| roundings, which is relative too
    where the gate is closed. What is below the smallest normal number may be flushed before eps
    amplifies it. A row that is held in the storage dtype among the subnormal numbers is rounded
    like the smallest normal one, before the gate multiplies it.
    """
    opening = functional.silu(gate.double())
    given = x.double() if norm_before_gate else x.double() * opening
    magnitude = rms_peak(given.unflatten(-1, (-1, group_size))) if x.numel() else 0.0
    gain = peak(opening) if norm_before_gate else 1.0
    magnitude *= peak(weight) * gain
    arguments = {
        "x": x,
        "gate": gate,
        "weight": weight,
        "eps": _EPS,
        "group_size": group_size,
        "norm_before_gate": norm_before_gate,
    }
    dims = {
        "hidden_size": weight.shape[0],
        "group_size": group_size,
        "norm_before_gate": norm_before_gate,
    }
    reduction = group_size + 4 + math.ceil(peak(gate)) + math.ceil(_EPS**-0.5)
    rounded = torch.finfo(x.dtype).smallest_normal * gain
    return Case(label, arguments, dims, reduction, magnitude, rounded)
