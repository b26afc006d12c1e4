"""Cases of lookup in tables of integers. T tokens, V rows, H hidden size, G numbers per scale."""

from __future__ import annotations

from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops.embedding._embedding_cases import TOKENS
from interposer_ops.quantizers._small_floats import pack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, uniform

_W4_TABLES = {  # V, H, G
    "groups of 32": (200, 128, 32),
    "groups of 128": (70, 256, 128),
    "one scale per row": (64, 96, 96),
    "one pair": (1, 2, 2),
    "odd groups": (31, 90, 15),
    "wide": (9, 1032, 24),
    "many rows": (5000, 16, 8),
}
_W8_TABLES = {  # None for as many numbers as H whose scales are [V]
    "groups of 32": (200, 128, 32),
    "one scale per row": (70, 256, 256),
    "a row of scales": (48, 64, None),
    "odd sizes": (37, 127, 127),
    "one number": (1, 1, 1),
    "odd groups": (31, 75, 15),
    "wide": (9, 1032, 24),
    "many rows": (5000, 16, 8),
}
_SINGLE = ("one pair", "one number")
_STRIDED: dict[str, Strides] = {
    "token_ids": "outer",
    "weight": "offset",
    "scale": "offset",
    "zero_points": "offset",
}


def _arguments(
    token_ids: torch.Tensor,
    sizes: tuple[int, int, int | None],
    bits: int,
    asymmetric: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Return the arguments of a lookup; scales of rows that nobody reads are NaN."""
    rows, width, group = sizes
    num_groups = width // (group or width)
    scale = torch.full((rows, num_groups), torch.nan)
    read = token_ids.unique()
    scale[read] = uniform((len(read), num_groups), torch.float32, generator, 0.01, 0.04)
    codes = _codes((rows, width), bits, generator)
    zero_points = _codes((rows, num_groups), bits, generator) if asymmetric else None
    return {
        "token_ids": token_ids,
        "weight": pack_nibbles(codes) if bits == 4 else codes,
        "scale": scale if group else scale.squeeze(1),
        "zero_points": zero_points,
        "out_dtype": dtype,
    }


def _codes(shape: tuple[int, int], bits: int, generator: torch.Generator) -> torch.Tensor:
    if bits == 4:
        return torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def _case(point: Point, bits: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, width, group = sizes = point["table"]
    token_ids = point["tokens"](rows, generator)
    asymmetric = point["zero points"]
    arguments = _arguments(token_ids, sizes, bits, asymmetric, dtype, generator)
    dims = {
        "vocab_size": rows,
        "hidden_size": width,
        "group_size": group or width,
        "num_groups": width // (group or width),
        "asymmetric": asymmetric,
    }
    return Case("", arguments, dims, reduction=0)


def _w4a16(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _case(point, 4, dtype, generator)


def _w8a16(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _case(point, 8, dtype, generator)


def _exists(point: Point, _: torch.dtype) -> bool:
    """Say no to the only row as the first, the last and the one that is repeated."""
    return point.labels["table"] not in _SINGLE or point.labels["tokens"] in (
        "one token",
        "one token repeated",
    )


w4a16_embedding_cases = CaseSpace(
    _w4a16,
    Axis("tokens", TOKENS),
    Axis("table", _W4_TABLES),
    Axis("zero points", {"": False, "zero points": True}),
    strided=_STRIDED,
    crossed={
        "tokens": ("many tokens", "first and last row"),
        "table": ("groups of 32", "odd groups"),
        "zero points": ("zero points",),
    },
    alone={"tokens": ("no tokens",)},
    valid=_exists,
)
"""One, many, repeated and no tokens, sizes of groups, zero points or none."""

w8a16_embedding_cases = CaseSpace(
    _w8a16,
    Axis("tokens", TOKENS),
    Axis("table", _W8_TABLES),
    Axis("zero points", {"": False, "zero points": True}),
    strided=_STRIDED,
    crossed={
        "tokens": ("many tokens", "first and last row"),
        "table": ("groups of 32", "odd sizes"),
        "zero points": ("zero points",),
    },
    alone={"tokens": ("no tokens",)},
    valid=_exists,
)
"""One, many, repeated and no tokens, sizes of groups, zero points or none."""


def w4a16_embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T tokens from anywhere in a vocabulary of four bits."""
    return _sample(4, dtype, dims, num_tokens, seed)


def w8a16_embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T tokens from anywhere in a vocabulary of int8."""
    return _sample(8, dtype, dims, num_tokens, seed)


def _sample(bits: int, dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rows, width = int(dims["vocab_size"]), int(dims["hidden_size"])
    sizes = rows, width, int(dims["group_size"])
    asymmetric = bool(dims["asymmetric"])
    arguments = _arguments(torch.arange(rows), sizes, bits, asymmetric, dtype, generator)
    arguments["token_ids"] = torch.randint(rows, (num_tokens,), generator=generator)
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)
