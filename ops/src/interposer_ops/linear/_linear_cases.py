"""Cases of dense projections. I input features, O output features."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, normal, peak, uniform

_ROWS = {  # shape of x without its last dimension
    "many rows": (33,),
    "one row": (1,),
    "few rows": (4,),
    "three dimensions": (2, 3),
    "65 rows": (65,),
    "a row after 128": (129,),
    "no rows": (0,),
}
_FEATURES = {  # I, O
    "": (128, 96),
    "odd sizes": (127, 65),
    "one element": (1, 1),
    "one output": (64, 1),
    "one input": (1, 48),
    "long sum": (2048, 16),
    "many weights": (640, 448),
    "sizes after powers of two": (129, 33),
}


def _linear(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    in_features, out_features = point["features"]
    shape = (*point["rows"], in_features)
    if point["numbers"]:
        x = uniform(shape, dtype, generator, 0.5, 1.5)
        weight = uniform((out_features, in_features), dtype, generator, 0.5, 1.5)
    else:
        x = normal(shape, dtype, generator)
        weight = normal((out_features, in_features), dtype, generator, in_features**-0.5)
    bias = normal((out_features,), dtype, generator) if point["bias"] else None
    terms = x.abs().double() @ weight.abs().double().T
    return Case(
        "",
        {"x": x, "weight": weight, "bias": bias},
        {"in_features": in_features, "out_features": out_features},
        reduction=in_features + point["bias"],
        magnitude=peak(terms) + (peak(bias) if bias is not None else 0.0),
        # The product may be stored before the bias is added to it.
        rounded=peak(x.double() @ weight.double().T) if point["bias"] else 0.0,
    )


linear_cases = CaseSpace(
    _linear,
    Axis("rows", _ROWS),
    Axis("features", _FEATURES),
    Axis("bias", {"": False, "bias": True}),
    # Sums of many equal signs outgrow what 16 bits can count, if they are kept in them.
    Axis("numbers", {"": False, "all positive": True}),
    strided={"x": "rows", "weight": "offset", "bias": "offset"},
    special={"x": ("NaN", "subnormals", "negative zeros")},
    crossed={
        "rows": ("many rows", "three dimensions"),
        "features": ("", "odd sizes"),
        "numbers": ("",),
    },
    alone={"rows": ("no rows",)},
    valid=lambda point, _: (
        not point["numbers"]
        or (point.labels["features"] in ("", "long sum", "odd sizes") and not point["bias"])
    ),
)
"""Several shapes with and without a bias; sums that cancel and that don't."""


def linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states and a weight without bias, which the dims do not tell."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    shape = (out_features, in_features)
    weight = normal_numbers(shape, dtype, generator, deviation=in_features**-0.5)
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    return Case(
        f"{num_tokens} tokens",
        {"x": x, "weight": weight, "bias": None},
        dims,
        reduction=in_features,
        magnitude=longest_row(x) * longest_row(weight),
    )
