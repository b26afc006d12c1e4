"""Cases of table lookup. T tokens, V rows of the table, H hidden size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, normal

_TABLES = {  # V, H
    "": (200, 128),
    "odd width": (7, 33),
    "one element": (1, 1),
    "wide": (31, 1025),
    "many rows": (5000, 16),
}
_PARTS = 4  # of a table that is shared out


_Drawn = Callable[[int, torch.Generator], torch.Tensor]
TOKENS: dict[str, _Drawn] = {
    "many tokens": lambda rows, generator: torch.randint(rows, (65,), generator=generator),
    "one token": lambda rows, _: torch.tensor([rows // 2]),
    "first and last row": lambda rows, _: torch.tensor([0, rows - 1]),
    "one token repeated": lambda rows, _: torch.full((9,), rows - 1),
    "descending": lambda rows, _: torch.arange(min(rows, 17)).flip(0),
    "no tokens": lambda _, __: torch.zeros(0, dtype=torch.int64),
}
"""Token ids of a vocabulary of so many rows."""


def _embedding(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, hidden_size = point["table"]
    token_ids = point["tokens"](rows, generator)
    weight = _read_rows(token_ids, rows, hidden_size, dtype, generator)
    dims = {"vocab_size": rows, "hidden_size": hidden_size, "tied": point["tied"]}
    return Case("", {"token_ids": token_ids, "weight": weight}, dims, reduction=0)


embedding_cases = CaseSpace(
    _embedding,
    Axis("tokens", TOKENS),
    Axis("table", _TABLES),
    Axis("tied", {"": False, "a head multiplies by it too": True}),
    strided={"token_ids": "outer", "weight": "offset"},
    special={"weight": ("infinities", "NaN", "subnormals", "negative zeros")},
    crossed={"tokens": ("many tokens", "first and last row"), "table": ("", "odd width", "wide")},
    alone={"tokens": ("no tokens",)},
    # The only row is the first, the last and the one that is repeated.
    valid=lambda point, _: (
        point.labels["table"] != "one element"
        or point.labels["tokens"] in ("one token", "one token repeated")
    ),
)
"""One, many, repeated and no tokens; rows of the table that nobody reads are NaN."""


def embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T tokens from anywhere in the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    weight = _table(dims, dtype, generator)
    token_ids = torch.randint(len(weight), (num_tokens,), generator=generator)
    arguments = {"token_ids": token_ids, "weight": weight}
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)


def _vocab_parallel(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, hidden_size = point["table"]
    first_row = point["part"] * rows
    token_ids = point["tokens"](_PARTS * rows, generator)
    if point["edges"]:
        token_ids = torch.tensor([first_row - 1, first_row, first_row + rows - 1, first_row + rows])
        token_ids = token_ids[token_ids >= 0]
    here = token_ids[(token_ids >= first_row) & (token_ids < first_row + rows)] - first_row
    weight = _read_rows(here, rows, hidden_size, dtype, generator)
    arguments = {"token_ids": token_ids, "weight": weight, "first_row": first_row}
    return Case("", arguments, {"vocab_size": rows, "hidden_size": hidden_size}, reduction=0)


vocab_parallel_embedding_cases = CaseSpace(
    _vocab_parallel,
    Axis("tokens", TOKENS),
    Axis("edges", {"": False, "around the edges of the part": True}),
    Axis("table", _TABLES),
    Axis("part", {"second part": 1, "first part": 0, "last part": _PARTS - 1}),
    strided={"token_ids": "outer", "weight": "offset"},
    crossed={"tokens": ("many tokens",), "table": ("", "odd width"), "part": ("second part",)},
    alone={"tokens": ("no tokens",)},
    valid=lambda point, _: not point["edges"] or point.labels["tokens"] == "many tokens",
)
"""Tokens of a whole vocabulary, of which a part is here; its unread rows are NaN."""


def vocab_parallel_embedding_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return T tokens of four parts of a vocabulary in turn, from the second on, which is here."""
    generator = torch.Generator().manual_seed(seed)
    weight = _table(dims, dtype, generator)
    rows = torch.randint(len(weight), (num_tokens,), generator=generator)
    token_ids = (1 + torch.arange(num_tokens)) % _PARTS * len(weight) + rows
    arguments = {"token_ids": token_ids, "weight": weight, "first_row": len(weight)}
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)


def _table(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    shape = (int(dims["vocab_size"]), int(dims["hidden_size"]))
    return normal_numbers(shape, dtype, generator)


def _read_rows(
    read: torch.Tensor, rows: int, width: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return a table of NaN but for the rows ``read``."""
    weight = torch.full((rows, width), torch.nan, dtype=dtype)
    distinct = read.unique()
    weight[distinct] = normal((len(distinct), width), dtype, generator)
    return weight
