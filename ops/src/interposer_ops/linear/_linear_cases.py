"""Test cases of dense linear layers: one weight, one per group of rows, or one per head.

T tokens, I input features, O output features, E experts, N heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.caches._paging_cases import starts_of
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
_GROUPS = {
    "several groups": [5, 9, 1, 16, 3],
    "empty groups": [0, 7, 0, 0, 4, 0],
    "one group": [6],
    "one row each": [1] * 8,
    "all rows in the last": [0, 0, 0, 13],
    "around a tile": [15, 16, 17],
    "no rows": [0, 0],
}
_GROUPED_FEATURES = {  # I, O
    "": (64, 48),
    "odd sizes": (65, 33),
    "one element": (1, 1),
    "one output": (32, 1),
    "long sum": (1024, 8),
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
        {"in_features": in_features, "out_features": out_features, "biased": point["bias"]},
        reduction=in_features + point["bias"],
        magnitude=peak(terms) + (peak(bias) if bias is not None else 0.0),
        # A kernel may round the matmul to the storage dtype before the bias is added.
        rounded=peak(x.double() @ weight.double().T) if point["bias"] else 0.0,
    )


linear_cases = CaseSpace(
    _linear,
    Axis("rows", _ROWS),
    Axis("features", _FEATURES),
    Axis("bias", {"": False, "bias": True}),
    # A kernel that accumulates in 16 bits loses digits of a long sum of equal signs.
    Axis("numbers", {"": False, "all positive": True}),
    strided={"x": "leading", "weight": "offset", "bias": "offset"},
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
"""Several shapes with and without a bias; sums that cancel and sums that do not."""


def linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows of hidden states and a weight, with a bias if the dims state ``biased``."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    shape = (out_features, in_features)
    weight = normal_numbers(shape, dtype, generator, deviation=in_features**-0.5)
    bias = normal((out_features,), dtype, generator) if dims.get("biased") else None
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    terms = longest_row(x) * longest_row(weight)
    return Case(
        f"{num_tokens} tokens",
        {"x": x, "weight": weight, "bias": bias},
        dims,
        reduction=in_features + (bias is not None),
        magnitude=terms + (0.0 if bias is None else peak(bias)),
        rounded=0.0 if bias is None else terms,
    )


def _grouped(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    groups, (in_features, out_features) = point["groups"], point["features"]
    num_rows = sum(groups) + point["spare"]
    x = normal((num_rows, in_features), dtype, generator)
    weight = _weights((len(groups), out_features, in_features), dtype, generator)
    return _grouped_case(x, weight, starts_of(groups), "")


grouped_linear_cases = CaseSpace(
    _grouped,
    Axis("groups", _GROUPS),
    Axis("features", _GROUPED_FEATURES),
    Axis("spare", {"": 0, "rows behind the last group": 3}),
    strided={"x": "rows", "weight": "offset", "group_starts": "offset"},
    # A NaN in one row must not spread to other rows.
    special={"x": ("NaN", "subnormals", "negative zeros")},
    crossed={"groups": ("several groups", "empty groups"), "features": ("", "odd sizes")},
    alone={"groups": ("no rows",)},
)
"""Groups of several sizes, empty groups, and rows that belong to no group."""


def grouped_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows, each assigned to a random expert."""
    generator = torch.Generator().manual_seed(seed)
    experts, out_features = int(dims["num_experts"]), int(dims["out_features"])
    in_features = int(dims["in_features"])
    shape = (experts, out_features, in_features)
    weight = normal_numbers(shape, dtype, generator, deviation=in_features**-0.5)
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    chosen = torch.randint(experts, (num_tokens,), generator=generator)
    counts = chosen.bincount(minlength=experts).tolist()
    return _grouped_case(x, weight, starts_of(counts), f"{num_tokens} tokens")


def _batched(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (in_features, out_features), heads = point["features"], point["heads"]
    x = normal((heads, point["tokens"], in_features), dtype, generator)
    if point["order"]:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    weight = _weights((heads, in_features, out_features), dtype, generator)
    return _batched_case(x, weight, "")


batched_linear_cases = CaseSpace(
    _batched,
    Axis("tokens", {"many tokens": 17, "one token": 1, "33 tokens": 33, "no tokens": 0}),
    Axis("heads", {"": 4, "one head": 1, "odd heads": 5}),
    Axis("features", {**_GROUPED_FEATURES, "one input": (1, 32)}),
    Axis("order", {"": False, "tokens before heads": True}),
    strided={"x": "rows", "weight": "offset"},
    special={"x": ("NaN", "subnormals", "negative zeros")},
    crossed={
        "tokens": ("many tokens",),
        "heads": ("", "odd heads"),
        "features": ("", "odd sizes"),
        "order": ("",),
    },
    alone={"tokens": ("no tokens",)},
    # One token or one head has the same memory layout in either order.
    valid=lambda point, _: not point["order"] or (point["tokens"] > 1 and point["heads"] > 1),
)
"""Heads before tokens and tokens before heads in memory, as projections store them."""


def batched_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make the projected queries of T tokens as a strided ``[N, T, I]`` view."""
    generator = torch.Generator().manual_seed(seed)
    heads, in_features = int(dims["num_heads"]), int(dims["in_features"])
    shape = (heads, in_features, int(dims["out_features"]))
    weight = normal_numbers(shape, dtype, generator, deviation=in_features**-0.5)
    x = normal_numbers((num_tokens, heads, in_features), dtype, generator)
    return _batched_case(x.transpose(0, 1), weight, f"{num_tokens} tokens")


def _weights(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return normal(shape, dtype, generator, shape[-1] ** -0.5)


def _grouped_case(x: Tensor, weight: Tensor, group_starts: Tensor, label: str) -> Case:
    experts, out_features, in_features = weight.shape
    return Case(
        label,
        {"x": x, "weight": weight, "group_starts": group_starts},
        {"in_features": in_features, "out_features": out_features, "num_experts": experts},
        reduction=in_features,
        magnitude=longest_row(x) * longest_row(weight),
    )


def _batched_case(x: Tensor, weight: Tensor, label: str) -> Case:
    heads, in_features, out_features = weight.shape
    return Case(
        label,
        {"x": x, "weight": weight},
        {"num_heads": heads, "in_features": in_features, "out_features": out_features},
        reduction=in_features,
        magnitude=longest_row(x) * longest_row(weight.mT),
    )
