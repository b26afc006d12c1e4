"""Cases of the paged cache of 8 bits per element. K kv heads, D head size, P pages, S page size."""

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
from interposer_testing.cases import Axis, CaseSpace, Point, normal, uniform

_DTYPES = {"": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SCALES = {"": False, "scale per head": True}
_HEADS = {"": (2, 64), "odd sizes": (3, 20), "one kv head": (1, 128)}
_PAGE_SIZES = {"": 16, "page of one": 1, "page of 12": 12}
_TOKENS = {"many tokens": 33, "one token": 1, "no tokens": 0}


def _writing(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (kv_heads, head_size), page_size = point["heads"], point["page size"]
    cache_dtype, num_tokens = point["cache"], point["tokens"]
    num_pages = max(4, -(-num_tokens // page_size))
    scales = [
        _scale(kv_heads if point["scale"] else 1, point["numbers"], dtype, generator)
        for _ in range(2)
    ]
    shape = (num_tokens, kv_heads, head_size)
    key, value = (
        _near_grid(shape, point["numbers"], dtype, cache_dtype, scale, generator)
        for scale in scales
    )
    keys, values = caches((num_pages, page_size, kv_heads, head_size), cache_dtype, paired=False)
    arguments = {
        "key": key,
        "value": value,
        "key_cache": keys,
        "value_cache": values,
        "slots": torch.randperm(num_pages * page_size, generator=generator)[:num_tokens],
        "key_scale": scales[0],
        "value_scale": scales[1],
        "cache_dtype": cache_dtype,
    }
    dims = _dims(kv_heads, head_size, page_size, cache_dtype, per_head=point["scale"])
    return Case("", arguments, dims, reduction=0)


reshape_and_cache_fp8_cases = CaseSpace(
    _writing,
    Axis("tokens", _TOKENS),
    Axis("heads", _HEADS),
    Axis("page size", _PAGE_SIZES),
    Axis("numbers", {"": "ordinary", **{n: n for n in ("subnormal", "saturated", "ties")}}),
    Axis("cache", _DTYPES),
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
            or (point["numbers"] != "ordinary" and point.labels["page size"])
            or (point["numbers"] == "saturated" and point.labels["tokens"] == "one token")
        )
    ),
)
"""Numbers near those of the grid, in its lowest range, beyond its end and between two of them."""


def reshape_and_cache_fp8_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return a typical step; the scales are drawn first."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, head_size = int(dims["num_kv_heads"]), int(dims["head_size"])
    page_size, cache_dtype = int(dims["page_size"]), _named(dims)
    scales = [
        _scale(kv_heads if dims["per_head"] else 1, "ordinary", dtype, generator) for _ in range(2)
    ]
    num_pages, slots = step_slots(num_tokens, page_size, generator)
    shape = (num_tokens, kv_heads, head_size)
    key, value = (
        _near_grid(shape, "ordinary", dtype, cache_dtype, scale, generator) for scale in scales
    )
    keys, values = caches((num_pages, page_size, kv_heads, head_size), cache_dtype, paired=False)
    arguments = {
        "key": key,
        "value": value,
        "key_cache": keys,
        "value_cache": values,
        "slots": slots,
        "key_scale": scales[0],
        "value_scale": scales[1],
        "cache_dtype": cache_dtype,
    }
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)


def _gathering(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (kv_heads, head_size), page_size = point["heads"], point["page size"]
    cache_dtype = point["cache"]
    found = gathering(
        point["batch"], point["spare"], (page_size, kv_heads, head_size), cache_dtype, generator
    )
    scale = _scale(kv_heads if point["scale"] else 1, "ordinary", dtype, generator)
    dims = _dims(kv_heads, head_size, page_size, cache_dtype, per_head=point["scale"])
    return Case("", _scaled(found, scale, dtype), dims, reduction=0)


gather_cache_fp8_cases = CaseSpace(
    _gathering,
    Axis("batch", BATCHES),
    Axis("heads", _HEADS),
    Axis("page size", _PAGE_SIZES),
    Axis("spare", {"": 0, "rows beyond the tokens": 5}),
    Axis("cache", _DTYPES),
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


def gather_cache_fp8_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return the cache of one sequence of T tokens; the scale is drawn first."""
    generator = torch.Generator().manual_seed(seed)
    count = int(dims["num_kv_heads"]) if dims["per_head"] else 1
    scale = _scale(count, "ordinary", dtype, generator)
    found = typical_gathering(_named(dims), dims, num_tokens, generator)
    case = Case(f"{num_tokens} tokens", _scaled(found, scale, dtype), dims)
    return replace(case, reduction=0)


def _scaled(
    gathered: dict[str, object], scale: torch.Tensor, dtype: torch.dtype
) -> dict[str, object]:
    num_tokens = gathered.pop("num_tokens")
    return {**gathered, "scale": scale, "num_tokens": num_tokens, "out_dtype": dtype}


def _scale(
    count: int, numbers: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return scales that keep what is stored by them within float16."""
    if numbers == "ties":
        return 2.0 ** torch.randint(-2, 1, (count,), generator=generator).float()
    scale = uniform((count,), torch.float32, generator, 0.2, 0.5)
    # The smallest numbers of e5m2 are subnormal in float16, unless they are scaled up.
    return scale * 64 if numbers == "subnormal" and dtype == torch.float16 else scale


def _near_grid(
    shape: tuple[int, int, int],
    numbers: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    scale: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return numbers whose quotients by ``scale`` round to the same number however computed.

    They are off a number of the grid by up to 1/50 of it, where the next tie is 1/32 away or more:
    storing them in bfloat16 moves them by 1/256 at most. Ties are exact, as scales are powers of
    two there. Quotients beyond the largest number are clamped to it wherever they lie.
    """
    facts = torch.finfo(cache_dtype)
    spread = {"subnormal": facts.smallest_normal, "saturated": 1.2 * facts.max}.get(numbers, 4.0)
    drawn = normal(shape, torch.float32, generator, spread)
    if numbers == "saturated":
        drawn = drawn.clamp(-2.2 * facts.max, 2.2 * facts.max)  # half of it is a float16
    below = drawn.clamp(-facts.max, facts.max)
    grid = below.to(cache_dtype).float()
    if numbers == "ties":
        # Away from zero, half a step of the binade that the number begins in.
        _, exponent = torch.frexp(grid)
        step = torch.ldexp(torch.full_like(grid, facts.eps), exponent - 1)
        moved = grid + torch.where(grid < 0, -step, step) / 2
    else:
        moved = grid * uniform(shape, torch.float32, generator, 0.98, 1.02)
    moved = torch.where(drawn.abs() > facts.max, drawn, moved)
    return (moved * scale[:, None]).to(dtype)


def _dims(
    kv_heads: int, head_size: int, page_size: int, cache_dtype: torch.dtype, *, per_head: bool
) -> dict[str, int | str | bool]:
    dims = cache_dims(kv_heads, head_size, page_size)
    name = str(cache_dtype).removeprefix("torch.")
    return {**dims, "cache_dtype": name, "per_head": per_head}


def _named(dims: Dims) -> torch.dtype:
    dtype = getattr(torch, str(dims["cache_dtype"]))
    assert isinstance(dtype, torch.dtype)
    return dtype
