"""Test cases of the norms of heads and groups.

Dimensions: T tokens, N heads, K kv heads, D head size, H hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.norms._norms_cases import norm_weight, rms_peak
from interposer_testing.cases import Axis, CaseSpace, Point, normal, peak

_EPS, _GATED_EPS = 1e-6, 1e-5
_SCALES = {"": 1.0, "zeros": 0.0, "smaller than eps": 3e-4, "large": 5e3}
_ROWS = {
    "": (7, 4, 64),
    "one row": (1, 128),
    "one element": (3, 2, 1),
    "odd width": (5, 3, 33),
    "no rows": (0, 4, 64),
    "batched": (2, 5, 2, 32),
    "wide": (2, 2048),
    "width after a power of two": (2, 3, 257),
}
# Hidden size and group size.
_GROUPS = {
    "one group": (128, 128),
    "four groups": (128, 32),
    "odd groups": (63, 21),
    "groups of one": (16, 1),
    "wide groups": (2050, 1025),
}
# Deviation of x, deviation and mean of the gates. With closed gates the mean square is below eps.
_GATES = {
    "": (1.0, 2.0, 0.0),
    "zeros": (0.0, 2.0, 0.0),
    "large": (3e3, 1.0, 0.0),
    "open gates": (1.0, 5.0, 30.0),
    "closed gates": (1.0, 5.0, -30.0),
    "exponentials overflow": (1.0, 60.0, -60.0),
}


def _qk_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    size, scale = point["head_size"], point["scale"]
    query, key = (
        normal((point["tokens"], heads, size), dtype, generator, scale) for heads in point["heads"]
    )
    weights = [norm_weight(size, dtype, generator, centre) for centre in (1.0, 0.5)]
    return _qk_norm_case(query, key, weights)


qk_norm_cases = CaseSpace(
    _qk_norm,
    Axis("tokens", {"": 9, "one token": 1, "no tokens": 0}),
    Axis("heads", {"MHA": (4, 4), "GQA": (6, 2), "MQA": (5, 1)}),
    Axis("head_size", {"": 64, "head 128": 128, "head 80": 80, "head 256": 256}),
    Axis("scale", _SCALES),
    strided={"query": "outer", "key": "outer", "query_weight": "offset", "key_weight": "offset"},
    special={"query": ("NaN", "negative zeros"), "key": ("infinities", "subnormals")},
    crossed={"tokens": ("", "one token"), "head_size": ("", "head 80"), "scale": ("",)},
    alone={"tokens": ("no tokens",)},
)
"""Several numbers, sizes and magnitudes of heads; different weights of query and key."""


def qk_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make query and key of T tokens as slices of one projection."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, size = (int(dims[n]) for n in ("num_heads", "num_kv_heads", "head_size"))
    weights = [norm_weight(size, dtype, generator) for _ in range(2)]
    projected = normal_numbers((num_tokens, heads + 2 * kv_heads, size), dtype, generator)
    query, key, _ = projected.split((heads, kv_heads, kv_heads), dim=1)
    return _qk_norm_case(query, key, weights, f"{num_tokens} tokens")


def _qk_norm_case(query: Tensor, key: Tensor, weights: list[Tensor], label: str = "") -> Case:
    size = query.shape[-1]
    weight_arguments = {"query_weight": weights[0], "key_weight": weights[1]}
    arguments = {"query": query, "key": key, **weight_arguments, "eps": _EPS}
    dims = {"num_heads": query.shape[1], "num_kv_heads": key.shape[1], "head_size": size}
    magnitude = max(rms_peak(x) * peak(w) for x, w in zip((query, key), weights, strict=True))
    return Case(label, arguments, dims, reduction=size, magnitude=magnitude)


def _l2_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _l2_norm_case(normal(point["shape"], dtype, generator, point["scale"]), point["eps"])


l2_norm_cases = CaseSpace(
    _l2_norm,
    Axis("shape", _ROWS),
    Axis("scale", _SCALES),
    Axis("eps", {"": _EPS, "large eps": 0.5}),
    strided={"x": "leading"},
    special={"x": ("infinities", "NaN", "subnormals", "negative zeros")},
    crossed={"shape": ("", "one row", "odd width", "batched"), "scale": ("",)},
    alone={"shape": ("no rows",)},
)
"""Rows of several shapes and magnitudes: zero, below the root of eps, large."""


def l2_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make the heads of T tokens: as many as the dims state, or 16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims.get("num_heads", 16)), int(dims["head_size"]))
    return _l2_norm_case(normal_numbers(shape, dtype, generator), _EPS, f"{num_tokens} tokens")


def _l2_norm_case(x: Tensor, eps: float, label: str = "") -> Case:
    """Build the test case of ``l2_norm`` for the input ``x``.

    All squares are positive, so the error of the sum is a relative error of the result. Results are
    at most 1.
    """
    dims = {"head_size": x.shape[-1]}
    return Case(label, {"x": x, "eps": eps}, dims, reduction=x.shape[-1], magnitude=1.0)


def _gated_rms_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    hidden_size, group_size = point["groups"]
    deviation, spread, mean = point["values"]
    shape = (*point["tokens"], hidden_size)
    x = normal(shape, dtype, generator, deviation)
    gate = (mean + normal(shape, torch.float32, generator, spread)).to(dtype)
    weight = norm_weight(hidden_size, dtype, generator)
    return _gated_case(x, gate, weight, group_size, point["order"])


gated_rms_norm_cases = CaseSpace(
    _gated_rms_norm,
    Axis("tokens", {"": (17,), "one row": (1,), "three dimensions": (2, 3), "no rows": (0,)}),
    Axis("groups", _GROUPS),
    Axis("values", _GATES),
    Axis("order", {"": False, "norm first": True}),
    strided={"x": "leading", "gate": "leading", "weight": "offset"},
    special={"x": ("infinities", "subnormals"), "gate": ("NaN", "negative zeros")},
    crossed={
        "tokens": ("", "three dimensions"),
        "groups": ("four groups", "odd groups"),
        "values": ("",),
    },
    alone={"tokens": ("no rows",)},
    # One row differs from many rows only in the tiles, and tiles do not depend on values.
    valid=lambda point, _: point.labels["tokens"] == "" or not point.labels["values"],
)
"""Groups of several sizes, gates that open, close and overflow, in both orders."""


def gated_rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows and their gates; by default one group per row, the gate before the norm."""
    generator = torch.Generator().manual_seed(seed)
    hidden_size = int(dims["hidden_size"])
    shape = (num_tokens, hidden_size)
    weight = norm_weight(hidden_size, dtype, generator)
    x, gate = (normal_numbers(shape, dtype, generator, deviation) for deviation in (1.0, 2.0))
    group_size = int(dims.get("group_size", hidden_size))
    norm_before_gate = bool(dims.get("norm_before_gate", False))
    return _gated_case(x, gate, weight, group_size, norm_before_gate, f"{num_tokens} tokens")


def _gated_case(
    x: Tensor, gate: Tensor, weight: Tensor, group_size: int, norm_before_gate: bool,
    label: str = "",
) -> Case:  # fmt: skip
    """Build the test case of ``gated_rms_norm`` for the input ``x``.

    Squares are positive, so the error of the sum is a relative error of the result. SiLU adds four
    operations and the error of an exponential, |gate| roundings, which is relative too where the
    gate is closed. A kernel may flush subnormal numbers to zero before eps amplifies the
    difference. A subnormal row in the storage dtype is rounded by as much as the smallest normal
    number is, before the gate multiplies the row.
    """
    gate_factor = functional.silu(gate.double())
    rows = x.double() if norm_before_gate else x.double() * gate_factor
    magnitude = rms_peak(rows.unflatten(-1, (-1, group_size))) if x.numel() else 0.0
    gain = peak(gate_factor) if norm_before_gate else 1.0
    options = {"group_size": group_size, "norm_before_gate": norm_before_gate}
    return Case(
        label,
        {"x": x, "gate": gate, "weight": weight, "eps": _GATED_EPS, **options},
        {"hidden_size": weight.shape[0], **options},
        reduction=group_size + 4 + math.ceil(peak(gate)) + math.ceil(_GATED_EPS**-0.5),
        magnitude=magnitude * (peak(weight) * gain),
        rounded=torch.finfo(x.dtype).smallest_normal * gain,
    )
