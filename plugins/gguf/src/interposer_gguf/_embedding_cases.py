"""Test cases of ``gguf_embedding``. T tokens, V vocabulary, H hidden size."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_gguf._block_formats import FORMATS, BlockFormat, format_named
from interposer_gguf._cases import random_rows
from interposer_ops.cases import TOKENS
from interposer_testing.cases import Axis, CaseSpace, Point, Strides

# V, H.
_TABLES = {"": (200, 256), "wide": (9, 1024), "one row": (1, 256)}
# Widths that are a multiple of 32 but not of 256: for the formats of short blocks only.
_SHORT_TABLES = {"three short blocks": (31, 96), "one short block": (500, 32)}
_STRIDED: dict[str, Strides] = {"token_ids": "outer", "weight": "offset"}
_ALL_ONES = 255  # two such bytes are a float16 NaN
_ONLY_ROW = ("one token", "one token repeated")


def _case(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, width = point["table"]
    layout: BlockFormat = point["format"]
    token_ids = point["tokens"](rows, generator)
    # Rows that no token uses are NaN, to detect a kernel that reads a wrong row.
    weight = torch.full((rows, layout.row_bytes(width)), _ALL_ONES, dtype=torch.uint8)
    used_ids = token_ids.unique()
    weight[used_ids] = random_rows(layout, len(used_ids), width, generator)
    dims = {
        "vocab_size": rows,
        "hidden_size": width,
        "stored_as": layout.name,
        "tied": point["tied"],
    }
    return _case_of("", token_ids, weight, layout, dtype, dims)


def _case_of(
    label: str,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    layout: BlockFormat,
    dtype: torch.dtype,
    dims: Dims,
) -> Case:
    """Return the case of a lookup in which only the addition of an offset rounds.

    A quantized value times the scale fits the 24 bits of float32: 11 bits of the float16, plus 6 or
    8 of the factor and 5 of the value, or 8 of a value without a factor.
    """
    arguments = {
        "token_ids": token_ids,
        "weight": weight,
        "stored_as": layout.name,
        "out_dtype": dtype,
    }
    scale, offset = layout.scales(weight[token_ids.unique()], torch.float32)
    if offset is None or not offset.numel():
        return Case(label, arguments, dims, reduction=0)
    largest = scale.abs() * max(-layout.lowest, layout.highest) + offset.abs()
    return Case(label, arguments, dims, reduction=1, magnitude=float(largest.max()))


gguf_embedding_cases = CaseSpace(
    _case,
    Axis("tokens", TOKENS),
    Axis("table", {**_TABLES, **_SHORT_TABLES}),
    Axis("format", FORMATS),
    Axis("tied", {"": False, "a head multiplies by it too": True}),
    strided=_STRIDED,
    crossed={
        "tokens": ("many tokens", "first and last row"),
        "table": ("", "three short blocks"),
        "tied": ("",),
    },
    alone={"tokens": ("no tokens",)},
    valid=lambda point, _: (
        point["table"][1] % point["format"].size == 0
        and (point["table"][0] > 1 or point.labels["tokens"] in _ONLY_ROW)
    ),
)
"""Every block format; one, many, repeated and no tokens. Rows without a token id are NaN."""


def gguf_embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T random token ids and a random embedding in blocks."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = int(dims["vocab_size"]), int(dims["hidden_size"])
    layout = format_named(str(dims["stored_as"]))
    weight = random_rows(layout, rows, width, generator, width**-0.5)
    token_ids = torch.randint(rows, (num_tokens,), generator=generator)
    return _case_of(f"{num_tokens} tokens", token_ids, weight, layout, dtype, dims)
