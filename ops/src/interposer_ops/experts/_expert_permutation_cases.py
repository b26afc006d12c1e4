"""Test cases of token permutation. T tokens, K chosen experts, E experts, H hidden size."""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import dtype_name, normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, normal, peak, uniform

# T, E, K.
_SHAPES = {
    "many tokens": (33, 16, 4),
    "one token": (1, 16, 4),
    "one choice": (7, 8, 1),
    "one expert": (5, 1, 1),
    "fewer slots than experts": (3, 64, 2),
    "a warp and one": (17, 60, 2),
    "no tokens": (0, 16, 2),
}
_SPREAD = {"": "even", "one expert for all": "same", "last experts only": "last"}
_OTHER_RANK = {"": 0.0, "other ranks": 0.5, "all on other ranks": 1.0}
_WIDTHS = {"": 64, "odd width": 33, "one element": 1, "wide": 1025}
_CROSSED = {"shape": ("many tokens", "a warp and one"), "spread": ("",), "width": ("", "odd width")}
_ALONE = {"shape": ("no tokens",)}


def random_experts(tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Return random expert ids ``[T, K]`` int32, distinct within each token."""
    order = torch.rand(tokens, num_experts, generator=generator).argsort(-1)
    return order[:, :top_k].to(torch.int32).contiguous()


def _experts(point: Point, generator: torch.Generator) -> Tensor:
    """Return the expert ids of a test point, some of them -1 (no expert)."""
    tokens, num_experts, top_k = point["shape"]
    ids = random_experts(tokens, num_experts, top_k, generator)
    if point["spread"] == "same":
        ids = ids[:1].expand(tokens, -1).contiguous()
    elif point["spread"] == "last":
        ids = ids.clamp(min=num_experts - 2)
    is_remote = torch.rand(tokens, top_k, generator=generator) < point["rank"]
    return ids.masked_fill(is_remote, -1)


def _permute(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, num_experts, _ = point["shape"]
    x = normal((tokens, point["width"]), dtype, generator)
    return _permute_case(x, _experts(point, generator).to(point["ids"]), num_experts)


moe_permute_cases = CaseSpace(
    _permute,
    Axis("shape", _SHAPES),
    Axis("spread", _SPREAD),
    Axis("rank", _OTHER_RANK),
    Axis("width", {k: v for k, v in _WIDTHS.items() if k != "one element"}),
    Axis("ids", {"": torch.int32, "long ids": torch.int64}),
    strided={"x": "rows", "expert_ids": "rows"},
    special={"x": ("infinities", "NaN", "subnormals", "negative zeros")},
    crossed={**_CROSSED, "rank": ("",), "ids": ("",), "shape": ("many tokens",)},
    alone={**_ALONE, "ids": ("long ids",)},
    valid=lambda point, _: _differs(point) and not (point["width"] == 1025 and point["rank"]),
)
"""Rows copied once, several times and not at all."""


def _unpermute(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, _, top_k = point["shape"]
    num_slots = tokens * top_k
    row_indices = torch.randperm(num_slots, generator=generator)
    is_remote = torch.rand(num_slots, generator=generator) < point["rank"]
    rows = normal((num_slots, point["width"]), dtype, generator)
    if point["rank"]:
        rows[row_indices[is_remote]] = torch.nan  # must not be read
    positions = row_indices.masked_fill(is_remote, -1).view(tokens, top_k).to(torch.int32)
    weights = uniform((tokens, top_k), point["weights"] or dtype, generator, 0.0, 1.0)
    return _unpermute_case({"rows": rows, "positions": positions, "weights": weights})


moe_unpermute_cases = CaseSpace(
    _unpermute,
    Axis("shape", {k: v for k, v in _SHAPES.items() if k != "a warp and one"}),
    Axis("rank", _OTHER_RANK),
    Axis("width", _WIDTHS),
    Axis("weights", {"": torch.float32, "weights like rows": None}),
    strided={"rows": "rows", "positions": "rows", "weights": "rows"},
    special={"rows": ("infinities", "NaN", "negative zeros")},
    crossed={"shape": ("many tokens",), "rank": ("",), "width": ("", "odd width")},
    alone=_ALONE,
    valid=lambda point, dtype: point["weights"] is not None or dtype != torch.float32,
)
"""Rows in random order, rows of other ranks NaN, weights in float32 and in the rows' dtype."""


def moe_permute_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build T rows of hidden states with evenly spread experts."""
    generator = torch.Generator().manual_seed(seed)
    num_experts, top_k = int(dims["num_experts"]), int(dims["top_k"])
    x = normal_numbers((num_tokens, int(dims["hidden_size"])), dtype, generator)
    expert_ids = random_experts(num_tokens, num_experts, top_k, generator)
    expert_ids = expert_ids.to(getattr(torch, str(dims.get("index_dtype", "int32"))))
    return _permute_case(x, expert_ids, num_experts, f"{num_tokens} tokens")


def moe_unpermute_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build rows of T tokens in random order, with weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["top_k"]))
    num_slots = shape[0] * shape[1]
    weights_dtype = getattr(torch, str(dims.get("weights_dtype", "float32")))
    arguments = {
        "rows": normal_numbers((num_slots, int(dims["hidden_size"])), dtype, generator),
        "positions": torch.randperm(num_slots, generator=generator).view(shape).to(torch.int32),
        "weights": torch.randn(shape, generator=generator).softmax(-1).to(weights_dtype),
    }
    return _unpermute_case(arguments, f"{num_tokens} tokens")


def _differs(point: Point) -> bool:
    """Return whether the expert ids of ``point`` differ from those of every earlier label."""
    tokens, num_experts, _ = point["shape"]
    spread, remote_fraction = point["spread"], point["rank"]
    if spread == "even":
        return True
    if remote_fraction == 1.0 or num_experts == 1:
        return False
    return not (spread == "same" and tokens == 1)


def _permute_case(x: Tensor, expert_ids: Tensor, num_experts: int, label: str = "") -> Case:
    arguments = {"x": x, "expert_ids": expert_ids, "num_experts": num_experts}
    sizes = {"hidden_size": x.shape[1], "top_k": expert_ids.shape[1], "num_experts": num_experts}
    dims: Dims = {**sizes, "index_dtype": dtype_name(expert_ids.dtype)}
    return Case(label, arguments, dims, reduction=0)


def _unpermute_case(arguments: dict[str, Tensor], label: str = "") -> Case:
    rows, weights = arguments["rows"], arguments["weights"]
    top_k, magnitude = weights.shape[1], peak(rows) * peak(weights.float().sum(-1))
    sizes = {"hidden_size": rows.shape[1], "top_k": top_k}
    dims: Dims = {**sizes, "weights_dtype": dtype_name(weights.dtype)}
    return Case(label, arguments, dims, reduction=top_k, magnitude=magnitude)
