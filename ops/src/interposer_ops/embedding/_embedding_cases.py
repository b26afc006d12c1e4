"""Test cases of embedding lookups in float and integer tables.

T tokens, V rows of the table, H hidden size, G numbers per scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers, random_integers
from interposer_ops.quantizers._small_floats import pack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, normal, uniform

_TABLES = {  # V, H
    "": (200, 128),
    "odd width": (7, 33),
    "one element": (1, 1),
    "wide": (31, 1025),
    "many rows": (5000, 16),
}
_W4_TABLES = {  # V, H, G
    "groups of 32": (200, 128, 32),
    "groups of 128": (70, 256, 128),
    "one scale per row": (64, 96, 96),
    "one pair": (1, 2, 2),
    "odd groups": (31, 90, 15),
    "wide": (9, 1032, 24),
    "many rows": (5000, 16, 8),
}
_W8_TABLES = {  # V, H, G; None for one scale per row, in a scale tensor of shape [V]
    "groups of 32": (200, 128, 32),
    "one scale per row": (70, 256, 256),
    "a row of scales": (48, 64, None),
    "odd sizes": (37, 127, 127),
    "one number": (1, 1, 1),
    "odd groups": (31, 75, 15),
    "wide": (9, 1032, 24),
    "many rows": (5000, 16, 8),
}
_DrawTokens = Callable[[int, torch.Generator], Tensor]
TOKENS: dict[str, _DrawTokens] = {
    "many tokens": lambda rows, generator: torch.randint(rows, (65,), generator=generator),
    "one token": lambda rows, _: torch.tensor([rows // 2]),
    "first and last row": lambda rows, _: torch.tensor([0, rows - 1]),
    "one token repeated": lambda rows, _: torch.full((9,), rows - 1),
    "descending": lambda rows, _: torch.arange(min(rows, 17)).flip(0),
    "no tokens": lambda _, __: torch.zeros(0, dtype=torch.int64),
}
"""Functions that draw token ids for a table with the passed number of rows."""


def _embedding(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, hidden_size = point["table"]
    token_ids = point["tokens"](rows, generator)
    weight = _table_with_unread_rows(token_ids, rows, hidden_size, dtype, generator)
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
    # In a table of one row, the other kinds of token lists are the same.
    valid=lambda point, _: (
        point.labels["table"] != "one element"
        or point.labels["tokens"] in ("one token", "one token repeated")
    ),
)
"""One, many, repeated and no tokens; rows that a kernel must not read are NaN."""


def embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T random tokens and an embedding table."""
    generator = torch.Generator().manual_seed(seed)
    weight = _table(dims, dtype, generator)
    token_ids = torch.randint(len(weight), (num_tokens,), generator=generator)
    arguments = {"token_ids": token_ids, "weight": weight}
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)


def _table(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    shape = (int(dims["vocab_size"]), int(dims["hidden_size"]))
    return normal_numbers(shape, dtype, generator)


def _table_with_unread_rows(
    token_ids: Tensor, rows: int, width: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Draw an embedding table: numbers in the rows ``token_ids``, NaN in all other rows."""
    weight = torch.full((rows, width), torch.nan, dtype=dtype)
    distinct = token_ids.unique()
    weight[distinct] = normal((len(distinct), width), dtype, generator)
    return weight


def _quantized_arguments(
    token_ids: Tensor, sizes: tuple[int, int, int | None], bits: int, asymmetric: bool,
    dtype: torch.dtype, generator: torch.Generator,
) -> dict[str, Any]:  # fmt: skip
    """Draw the arguments of a quantized lookup; scales of unread rows are NaN."""
    rows, width, group = sizes
    num_groups = width // (group or width)
    scale = torch.full((rows, num_groups), torch.nan)
    distinct = token_ids.unique()
    scale[distinct] = uniform((len(distinct), num_groups), torch.float32, generator, 0.01, 0.04)
    quantized = random_integers(bits, (rows, width), generator)
    zero_points = random_integers(bits, (rows, num_groups), generator) if asymmetric else None
    return {
        "token_ids": token_ids,
        "weight": pack_nibbles(quantized) if bits == 4 else quantized,
        "scale": scale if group else scale.squeeze(1),
        "zero_points": zero_points,
        "out_dtype": dtype,
    }


def _quantized(point: Point, dtype: torch.dtype, generator: torch.Generator, *, bits: int) -> Case:
    rows, width, group = sizes = point["table"]
    token_ids = point["tokens"](rows, generator)
    asymmetric = point["zero points"]
    arguments = _quantized_arguments(token_ids, sizes, bits, asymmetric, dtype, generator)
    dims = {
        "vocab_size": rows,
        "hidden_size": width,
        "group_size": group or width,
        "num_groups": width // (group or width),
        "asymmetric": asymmetric,
    }
    return Case("", arguments, dims, reduction=0)


def _quantized_space(
    bits: int, tables: Mapping[str, tuple[int, int, int | None]], crossed: tuple[str, ...]
) -> CaseSpace:
    return CaseSpace(
        partial(_quantized, bits=bits),
        Axis("tokens", TOKENS),
        Axis("table", tables),
        Axis("zero points", {"": False, "zero points": True}),
        strided={
            "token_ids": "outer",
            **dict.fromkeys(("weight", "scale", "zero_points"), "offset"),
        },
        varying={"scale": ("rank",)} if bits == 8 else {},
        crossed={
            "tokens": ("many tokens", "first and last row"),
            "table": crossed,
            "zero points": ("zero points",),
        },
        alone={"tokens": ("no tokens",)},
        # In a table of one row, the other kinds of token lists are the same.
        valid=lambda point, _: (
            point.labels["table"] not in ("one pair", "one number")
            or point.labels["tokens"] in ("one token", "one token repeated")
        ),
    )


# One, many, repeated and no tokens; sizes of groups; with and without zero points.
w4a16_embedding_cases = _quantized_space(4, _W4_TABLES, ("groups of 32", "odd groups"))
w8a16_embedding_cases = _quantized_space(8, _W8_TABLES, ("groups of 32", "odd sizes"))


def _quantized_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int, *, bits: int
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rows, width = int(dims["vocab_size"]), int(dims["hidden_size"])
    sizes = rows, width, int(dims["group_size"])
    asymmetric = bool(dims["asymmetric"])
    arguments = _quantized_arguments(torch.arange(rows), sizes, bits, asymmetric, dtype, generator)
    arguments["token_ids"] = torch.randint(rows, (num_tokens,), generator=generator)
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)


# T random tokens.
w4a16_embedding_sample = partial(_quantized_sample, bits=4)
w8a16_embedding_sample = partial(_quantized_sample, bits=8)
