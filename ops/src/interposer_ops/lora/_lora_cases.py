"""Test cases of low-rank adapters.

T tokens, I input features, O output features, A adapters, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, normal, peak

_TOKENS = {  # repeating pattern of adapters (-1 for none) and T; A is 3
    "adapters in turn": ([0, -1, 2, 1, 2], 23),
    "one token": ([1], 1),
    "one adapter": ([2], 9),
    "runs": ([0] * 7 + [2] * 9 + [-1] * 3, 19),
    "no adapter": ([-1], 5),
    "no tokens": ([-1], 0),
}
_RANKS = {"": 16, "rank 8": 8, "rank 64": 64, "odd rank": 5, "rank 1": 1}
_WIDTHS = {"": 128, "odd width": 65, "width 1": 1, "wide": 640}
_ADAPTERS = 3


def _shrink(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    adapter_ids = _adapter_ids(point)
    x = normal((len(adapter_ids), point["width"]), dtype, generator)
    lora_a = _matrices((_ADAPTERS, point["rank"], point["width"]), dtype, generator)
    return _shrink_case(x, lora_a, adapter_ids, point["scale"], "")


lora_shrink_cases = CaseSpace(
    _shrink,
    Axis("tokens", _TOKENS),
    Axis("rank", _RANKS),
    Axis("width", _WIDTHS),
    Axis("scale", {"": 0.25, "scale of 2": 2.0}),
    strided={"x": "rows", "lora_a": "offset", "adapter_ids": "offset"},
    special={"x": ("NaN", "subnormals", "negative zeros")},
    crossed={
        "tokens": ("adapters in turn",),
        "rank": ("", "odd rank"),
        "width": ("", "odd width"),
        "scale": ("",),
    },
    alone={"tokens": ("no adapter", "no tokens")},
    # The scale does not depend on ranks and widths.
    valid=lambda point, _: (
        not (point.labels["scale"] and (point.labels["rank"] or point.labels["width"]))
    ),
)
"""Rows that share an adapter, have different adapters, and have none."""


def lora_shrink_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows, each with a random adapter or none."""
    generator = torch.Generator().manual_seed(seed)
    adapters, rank, width = (int(dims[n]) for n in ("num_adapters", "rank", "in_features"))
    shape = (adapters, rank, width)
    lora_a = normal_numbers(shape, dtype, generator, deviation=width**-0.5)
    x = normal_numbers((num_tokens, width), dtype, generator)
    adapter_ids = torch.randint(-1, adapters, (num_tokens,), generator=generator)
    return _shrink_case(x, lora_a, adapter_ids, 0.5, f"{num_tokens} tokens")


def _expand(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    adapter_ids = _adapter_ids(point)
    shrunk = normal((len(adapter_ids), point["rank"]), torch.float32, generator)
    lora_b = _matrices((_ADAPTERS, point["width"], point["rank"]), dtype, generator)
    before, after = point["columns"]
    y = normal((len(adapter_ids), before + point["width"] + after), dtype, generator)
    return _expand_case(shrunk, lora_b, adapter_ids, y, before, "")


lora_expand_cases = CaseSpace(
    _expand,
    Axis("tokens", _TOKENS),
    Axis("rank", _RANKS),
    Axis("width", _WIDTHS),
    Axis("columns", {"": (0, 0), "columns before": (48, 0), "columns on both sides": (7, 33)}),
    strided={"shrunk": "rows", "lora_b": "offset", "adapter_ids": "offset", "y": "rows"},
    special={"y": ("NaN", "infinities", "subnormals", "negative zeros")},
    crossed={
        "tokens": ("adapters in turn",),
        "rank": ("", "odd rank"),
        "width": ("", "odd width"),
        "columns": ("", "columns on both sides"),
    },
    alone={"tokens": ("no adapter", "no tokens")},
    # Unchanged columns do not depend on the rank.
    valid=lambda point, _: not (point.labels["columns"] and point.labels["rank"]),
)
"""The adapters of ``lora_shrink``, added to all or to some columns."""


def lora_expand_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows, each with a random adapter or none, for a linear layer of one projection."""
    generator = torch.Generator().manual_seed(seed)
    adapters, rank, width = (int(dims[n]) for n in ("num_adapters", "rank", "out_features"))
    lora_b = normal_numbers((adapters, width, rank), dtype, generator, deviation=rank**-0.5)
    wide = torch.promote_types(dtype, torch.float32)
    shrunk = normal_numbers((num_tokens, rank), wide, generator)
    adapter_ids = torch.randint(-1, adapters, (num_tokens,), generator=generator)
    y = normal_numbers((num_tokens, width), dtype, generator)
    return _expand_case(shrunk, lora_b, adapter_ids, y, 0, f"{num_tokens} tokens")


def _adapter_ids(point: Point) -> Tensor:
    pattern, count = point["tokens"]
    return torch.tensor((pattern * -(-count // len(pattern)))[:count], dtype=torch.int64)


def _matrices(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    return normal(shape, dtype, generator, shape[-1] ** -0.5)


def _shrink_case(x: Tensor, lora_a: Tensor, adapter_ids: Tensor, scale: float, label: str) -> Case:
    adapters, rank, width = lora_a.shape
    return Case(
        label,
        {"x": x, "lora_a": lora_a, "adapter_ids": adapter_ids, "scale": scale},
        {"in_features": width, "rank": rank, "num_adapters": adapters},
        reduction=width,
        magnitude=scale * longest_row(x) * longest_row(lora_a),
    )


def _expand_case(
    shrunk: Tensor, lora_b: Tensor, adapter_ids: Tensor, y: Tensor, offset: int, label: str
) -> Case:
    adapters, width, rank = lora_b.shape
    expanded = torch.einsum("tr,aor->tao", shrunk.double(), lora_b.double())
    return Case(
        label,
        {"shrunk": shrunk, "lora_b": lora_b, "adapter_ids": adapter_ids, "y": y, "offset": offset},
        {"out_features": width, "rank": rank, "num_adapters": adapters},
        reduction=rank + 1,
        magnitude=peak(y) + longest_row(shrunk) * longest_row(lora_b),
        rounded=peak(expanded),
    )
