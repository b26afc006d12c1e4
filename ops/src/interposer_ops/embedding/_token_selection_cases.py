"""Cases of choosing and padding rows.

Dimensions: T rows of all sequences, B sequences, L rows of the longest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.caches._paging_cases import starts_of
from interposer_testing.cases import Axis, CaseSpace, Point, normal

_ROWS = {  # shape of a row
    "": (64,),
    "odd width": (65,),
    "one element": (1,),
    "wide": (1025,),
    "heads": (3, 20),
}
_CHOSEN = {
    "some": [3, 7, 20, 22],
    "one": [5],
    "first and last": [0, 22],
    "repeated": [4, 4, 4, 9, 4],
    "descending": list(range(22, -1, -1)),
    "none": [],
}
_SEQUENCES = {
    "several": [4, 1, 7, 2],
    "one": [5],
    "one row each": [1, 1, 1],
    "as long as each other": [3, 3],
    "some empty": [0, 4, 0, 0, 2, 0],
    "none": [],
}


def _select_rows(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    chosen = torch.tensor(point["chosen"], dtype=torch.int64)
    x = torch.full((23, *point["row"]), torch.nan, dtype=dtype)
    read = chosen.unique()
    x[read] = normal((len(read), *point["row"]), dtype, generator)
    return Case("", {"x": x, "indices": chosen}, _dims(point), reduction=0)


select_rows_cases = CaseSpace(
    _select_rows,
    Axis("chosen", _CHOSEN),
    Axis("row", _ROWS),
    strided={"x": "leading", "indices": "offset"},
    special={"x": ("infinities", "subnormals", "negative zeros")},
    crossed={"chosen": ("first and last", "descending"), "row": ("", "odd width", "heads")},
    alone={"chosen": ("none",)},
)
"""Rows in any order, also repeated; rows that are not chosen are NaN."""


def select_rows_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of which every fourth is the last one of its sequence."""
    generator = torch.Generator().manual_seed(seed)
    x = normal_numbers((num_tokens, int(dims["hidden_size"])), dtype, generator)
    indices = torch.arange(num_tokens - 1, -1, -4).flip(0)
    return Case(f"{num_tokens} tokens", {"x": x, "indices": indices}, dims, reduction=0)


def _pad_rows(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    lengths = point["sequences"]
    x = normal((sum(lengths) + point["rows"], *point["row"]), dtype, generator)
    max_rows = max(lengths, default=0) + point["longest"]
    arguments = {"x": x, "starts": starts_of(lengths), "max_rows": max_rows}
    return Case("", arguments, _dims(point), reduction=0)


def _unpad_rows(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    lengths = point["sequences"]
    longest = max(lengths, default=0) + point["longest"]
    padded = torch.full((len(lengths), longest, *point["row"]), torch.nan, dtype=dtype)
    for row, length in enumerate(lengths):
        padded[row, :length] = normal((length, *point["row"]), dtype, generator)
    num_rows = sum(lengths) + point["rows"]
    arguments = {"padded": padded, "starts": starts_of(lengths), "num_rows": num_rows}
    return Case("", arguments, _dims(point), reduction=0)


def _of_sequences(
    build: Callable[[Point, torch.dtype, torch.Generator], Case], name: str
) -> CaseSpace:
    return CaseSpace(
        build,
        Axis("sequences", _SEQUENCES),
        Axis("row", _ROWS),
        # Rows of x behind those of all sequences, and rows beyond the longest sequence.
        Axis("rows", {"": 0, "spare rows": 3}),
        Axis("longest", {"": 0, "longer than any": 2}),
        strided={name: "leading", "starts": "offset"},
        special={name: ("infinities", "NaN", "subnormals", "negative zeros")},
        crossed={
            "sequences": ("several", "some empty"),
            "row": ("", "odd width", "heads"),
            "rows": ("",),
            "longest": ("",),
        },
        alone={"sequences": ("none",)},
    )


pad_rows_cases = _of_sequences(_pad_rows, "x")
"""Sequences of several lengths, also empty; rows that belong to none."""

unpad_rows_cases = _of_sequences(_unpad_rows, "padded")
"""The sequences of ``pad_rows``; padding is NaN."""


def _dims(point: Point) -> dict[str, int]:
    return {"hidden_size": math.prod(point["row"])}
