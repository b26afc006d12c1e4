"""Cases of the norms of heads. T tokens, N heads, K kv heads, D head size."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.norms._norms_cases import norm_weight, rms_peak
from interposer_testing.cases import Axis, CaseSpace, Point, normal, peak

_EPS = 1e-6
_TOKENS = {"": 9, "one token": 1, "no tokens": 0}
_HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (5, 1)}
_SIZES = {"": 64, "head 128": 128, "head 80": 80, "head 256": 256}
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


def _qk_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    size, scale = point["head_size"], point["scale"]
    query, key = (
        normal((point["tokens"], heads, size), dtype, generator, scale) for heads in point["heads"]
    )
    weights = [norm_weight(size, dtype, generator, centre) for centre in (1.0, 0.5)]
    return _qk_norm_case(query, key, weights)


qk_norm_cases = CaseSpace(
    _qk_norm,
    Axis("tokens", _TOKENS),
    Axis("heads", _HEADS),
    Axis("head_size", _SIZES),
    Axis("scale", _SCALES),
    strided={"query": "outer", "key": "outer", "query_weight": "offset", "key_weight": "offset"},
    special={
        "query": ("NaN", "negative zeros"),
        "key": ("infinities", "subnormals"),
    },
    crossed={"tokens": ("", "one token"), "head_size": ("", "head 80"), "scale": ("",)},
    alone={"tokens": ("no tokens",)},
)
"""Heads of several numbers, sizes and magnitudes, query and key of different weights."""


def qk_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return query and key as slices of one projection of T tokens."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, size = (int(dims[n]) for n in ("num_heads", "num_kv_heads", "head_size"))
    weights = [norm_weight(size, dtype, generator) for _ in range(2)]
    projected = normal_numbers((num_tokens, heads + 2 * kv_heads, size), dtype, generator)
    query, key, _ = projected.split((heads, kv_heads, kv_heads), dim=1)
    return _qk_norm_case(query, key, weights, f"{num_tokens} tokens")


def _qk_norm_case(
    query: torch.Tensor, key: torch.Tensor, weights: list[torch.Tensor], label: str = ""
) -> Case:
    arguments = {
        "query": query,
        "key": key,
        "query_weight": weights[0],
        "key_weight": weights[1],
        "eps": _EPS,
    }
    size = query.shape[-1]
    dims = {"num_heads": query.shape[1], "num_kv_heads": key.shape[1], "head_size": size}
    magnitude = max(rms_peak(x) * peak(w) for x, w in zip((query, key), weights, strict=True))
    return Case(label, arguments, dims, reduction=size, magnitude=magnitude)


def _l2_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    x = normal(point["shape"], dtype, generator, point["scale"])
    return _l2_norm_case(x, point["eps"])


l2_norm_cases = CaseSpace(
    _l2_norm,
    Axis("shape", _ROWS),
    Axis("scale", _SCALES),
    Axis("eps", {"": _EPS, "large eps": 0.5}),
    strided={"x": "rows"},
    special={"x": ("infinities", "NaN", "subnormals", "negative zeros")},
    crossed={"shape": ("", "one row", "odd width", "batched"), "scale": ("",)},
    alone={"shape": ("no rows",)},
)
"""Rows of several shapes and magnitudes: zero, below the root of eps, large."""


def l2_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return the heads of T tokens; 16 of them, unless the dims say how many."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims.get("num_heads", 16)), int(dims["head_size"]))
    return _l2_norm_case(normal_numbers(shape, dtype, generator), _EPS, f"{num_tokens} tokens")


def _l2_norm_case(x: torch.Tensor, eps: float, label: str = "") -> Case:
    """Return the case of ``x``.

    The squares are all positive, so the error of their sum shows as a relative one of the result,
    which is at most 1.
    """
    dims = {"head_size": x.shape[-1]}
    return Case(label, {"x": x, "eps": eps}, dims, reduction=x.shape[-1], magnitude=1.0)
