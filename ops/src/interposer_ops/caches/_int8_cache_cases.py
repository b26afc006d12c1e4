"""Cases of the paged cache of int8. K kv heads, D head size, P pages, S page size."""

from __future__ import annotations

from dataclasses import replace

import torch

from interposer import Case, Dims
from interposer_ops.caches._kv_cache_cases import (
    BATCHES,
    cache_dims,
    gathering,
    step_slots,
    typical_gathering,
)
from interposer_ops.caches._paging_cases import caches
from interposer_ops.quantizers._quantizer_inputs_cases import clear_of_boundaries, signed_choice
from interposer_testing.cases import Axis, CaseSpace, Point, normal, uniform

_SCALES = {"": False, "scale per head": True}
_HEADS = {"": (2, 64), "odd sizes": (3, 20), "one kv head": (1, 128)}
_PAGE_SIZES = {"": 16, "page of one": 1, "page of 12": 12}
_TOKENS = {"many tokens": 33, "one token": 1, "no tokens": 0}
# The standard deviations of quotients.
_NUMBERS = {"": 40.0, "small": 0.7, "saturated": 300.0, "ties": 0.0}
# All n + 0.5 that bfloat16 represents.
_HALVES = torch.arange(127, dtype=torch.float64) + 0.5


def _writing(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (kv_heads, head_size), page_size = point["heads"], point["page size"]
    num_tokens = point["tokens"]
    num_pages = max(4, -(-num_tokens // page_size))
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_tokens]
    sizes = (num_pages, page_size, kv_heads, head_size)
    per_head, deviation = point["scale"], point["numbers"]
    scales = _scales(kv_heads if per_head else 1, deviation, generator)
    return _stored(sizes, slots, scales, deviation, dtype, generator, per_head=per_head)


reshape_and_cache_int8_cases = CaseSpace(
    _writing,
    Axis("tokens", _TOKENS),
    Axis("heads", _HEADS),
    Axis("page size", _PAGE_SIZES),
    Axis("numbers", _NUMBERS),
    Axis("scale", _SCALES),
    strided={
        "key": "outer",
        "value": "outer",
        "key_cache": "outer",
        "value_cache": "outer",
        "slots": "offset",
        "key_scale": "offset",
        "value_scale": "offset",
    },
    special={"key": ("infinities",), "value": ("infinities",)},
    crossed={
        "tokens": ("many tokens",),
        "heads": ("", "odd sizes"),
        "page size": ("",),
        "numbers": ("",),
    },
    alone={"tokens": ("no tokens",)},
    # One kv head has one scale. Where tokens go differs from how they are rounded.
    valid=lambda point, _: (
        not (
            (point["scale"] and point["heads"][0] == 1)
            or (point.labels["numbers"] and point.labels["page size"])
        )
    ),
)
"""Numbers within and beyond the range, most of them below 1, and between two codes."""


def reshape_and_cache_int8_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return a typical step; the scales are drawn first."""
    generator = torch.Generator().manual_seed(seed)
    page_size = int(dims["page_size"])
    per_head, deviation = bool(dims["per_head"]), _NUMBERS[""]
    scales = _scales(int(dims["num_kv_heads"]) if per_head else 1, deviation, generator)
    num_pages, slots = step_slots(num_tokens, page_size, generator)
    sizes = (num_pages, page_size, int(dims["num_kv_heads"]), int(dims["head_size"]))
    case = _stored(sizes, slots, scales, deviation, dtype, generator, per_head=per_head)
    return replace(case, label=f"{num_tokens} tokens")


def _stored(
    sizes: tuple[int, int, int, int],
    slots: torch.Tensor,
    scales: list[torch.Tensor],
    deviation: float,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    per_head: bool,
) -> Case:
    """Return tokens for ``slots`` of a cache ``[P, S, K, D]``; ties where ``deviation`` is 0."""
    _, page_size, kv_heads, head_size = sizes
    shape = (len(slots), kv_heads, head_size)
    key, value = (_clear(shape, scale, deviation, dtype, generator) for scale in scales)
    keys, values = caches(sizes, torch.int8, paired=False)
    arguments = {
        "key": key,
        "value": value,
        "key_cache": keys,
        "value_cache": values,
        "slots": slots,
        "key_scale": scales[0],
        "value_scale": scales[1],
    }
    dims = {**cache_dims(kv_heads, head_size, page_size), "per_head": per_head}
    return Case("", arguments, dims, reduction=0)


def _gathering(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (kv_heads, head_size), page_size = point["heads"], point["page size"]
    page_shape = (page_size, kv_heads, head_size)
    found = gathering(point["batch"], point["spare"], page_shape, torch.int8, generator)
    scale = _scale(kv_heads if point["scale"] else 1, generator, is_power=False)
    dims = {**cache_dims(kv_heads, head_size, page_size), "per_head": point["scale"]}
    return Case("", _scaled(found, scale, dtype), dims, reduction=0)


gather_cache_int8_cases = CaseSpace(
    _gathering,
    Axis("batch", BATCHES),
    Axis("heads", _HEADS),
    Axis("page size", _PAGE_SIZES),
    Axis("spare", {"": 0, "rows beyond the tokens": 5}),
    Axis("scale", _SCALES),
    strided={
        "cache": "outer",
        "page_table": "rows",
        "seq_lens": "offset",
        "starts": "offset",
        "scale": "offset",
    },
    crossed={"batch": ("chunks",), "heads": ("odd sizes",), "page size": ("",)},
    # One kv head has one scale. The scale of a number has nothing to do with where it stands.
    valid=lambda point, _: (
        bool(point["batch"] or (point["spare"] and not point.labels["heads"]))
        and not (point["scale"] and point["heads"][0] == 1)
        and not (point["scale"] and (point.labels["page size"] or point["spare"]))
        and not (point["spare"] and point.labels["page size"])
    ),
)
"""Whole sequences and chunks on shuffled pages, by one scale and by one for every head."""


def gather_cache_int8_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return the cache of one sequence of T tokens; the scale is drawn first."""
    generator = torch.Generator().manual_seed(seed)
    count = int(dims["num_kv_heads"]) if dims["per_head"] else 1
    scale = _scale(count, generator, is_power=False)
    found = typical_gathering(torch.int8, dims, num_tokens, generator)
    return Case(f"{num_tokens} tokens", _scaled(found, scale, dtype), dims, reduction=0)


def _scaled(
    gathered: dict[str, object], scale: torch.Tensor, dtype: torch.dtype
) -> dict[str, object]:
    num_tokens = gathered.pop("num_tokens")
    return {**gathered, "scale": scale, "num_tokens": num_tokens, "out_dtype": dtype}


def _scales(count: int, deviation: float, generator: torch.Generator) -> list[torch.Tensor]:
    """Return scales of keys and of values for numbers of ``deviation``, or for ties."""
    return [_scale(count, generator, is_power=deviation == 0) for _ in range(2)]


def _scale(count: int, generator: torch.Generator, *, is_power: bool) -> torch.Tensor:
    if is_power:
        return 2.0 ** torch.randint(-6, 1, (count,), generator=generator).float()
    return uniform((count,), torch.float32, generator, 0.005, 0.05)


def _clear(
    shape: tuple[int, int, int],
    scale: torch.Tensor,
    deviation: float,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return numbers whose quotients by ``scale`` round to the same code however computed.

    Ties are exact, as scales are powers of two there.
    """
    wide = scale.double()[:, None]
    if deviation == 0:
        return (signed_choice(_HALVES, shape, generator) * wide).to(dtype)
    x = (normal(shape, torch.float32, generator, deviation) * wide).to(dtype)
    return clear_of_boundaries(x, x.double() / wide, lambda q: q.round().clamp(-128, 127))
