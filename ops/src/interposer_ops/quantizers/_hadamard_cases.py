"""Cases of the Walsh-Hadamard transform. T rows, H width."""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, normal

_ROWS = {
    "many rows": (33,),
    "one row": (1,),
    "five rows": (5,),
    "three dimensions": (2, 3),
    "no rows": (0,),
}
_WIDTHS = {str(width): width for width in (64, 1, 2, 4, 16, 128, 256, 1024)}


def _hadamard(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    x = normal((*point["rows"], point["width"]), dtype, generator)
    scale = point["width"] ** -0.5 if point["scale"] is None else point["scale"]
    return _case(x, scale, "")


hadamard_transform_cases = CaseSpace(
    _hadamard,
    Axis("rows", _ROWS),
    Axis("width", _WIDTHS),
    Axis("scale", {"": None, "not scaled": 1.0}),
    strided={"x": "leading"},
    special={"x": ("NaN", "subnormals", "negative zeros")},
    crossed={"rows": ("many rows", "three dimensions"), "width": ("64", "2"), "scale": ("",)},
    alone={"rows": ("no rows",)},
    valid=lambda point, _: not (point.labels["scale"] and point["width"] == 1),
)
"""Widths of 1 to 1024, with rows that keep their length and that don't."""


def hadamard_transform_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows that keep their length."""
    generator = torch.Generator().manual_seed(seed)
    width = int(dims["hidden_size"])
    x = normal_numbers((num_tokens, width), dtype, generator)
    return _case(x, width**-0.5, f"{num_tokens} tokens")


def _case(x: Tensor, scale: float, label: str) -> Case:
    width = x.shape[-1]
    return Case(
        label,
        {"x": x, "scale": scale},
        {"hidden_size": width},
        reduction=width,
        magnitude=scale * longest_row(x) * width**0.5,
    )
