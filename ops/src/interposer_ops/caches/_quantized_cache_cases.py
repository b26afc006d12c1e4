"""Test cases of the 8-bit paged cache. K kv heads, D head size, P pages, S page size.

The numbers are chosen so that every way to compute x / scale rounds to the same stored value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops.caches._kv_cache_cases import (
    BATCHES,
    GATHERED,
    SPARE,
    WRITTEN,
    gathering,
    point_dims,
    random_slots,
    step_slots,
    typical_gathering,
)
from interposer_ops.caches._paging_cases import caches
from interposer_ops.quantizers._quantizer_inputs_cases import clear_of_boundaries, signed_choice
from interposer_testing.cases import Axis, CaseSpace, Point, Special, normal, uniform

_FORMATS = Axis("cache", {"": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2})
_SCALES = Axis("scale", {"": False, "scale per head": True})
_HEADS = Axis("heads", {"": (2, 64), "odd sizes": (3, 20), "one kv head": (1, 128)})
_PAGE_SIZES = Axis("page size", {"": 16, "page of one": 1, "page of 12": 12})
_NUMBERS = ("subnormal", "saturated", "ties")
# Standard deviations of x / scale for int8; ties are drawn differently.
_DEVIATIONS = {"": 40.0, "small": 0.7, "saturated": 300.0}
# All n + 0.5 that bfloat16 represents.
_HALVES = torch.arange(127, dtype=torch.float64) + 0.5


def _writing(
    numbers: Sequence[str],
    *formats: Axis,
    valid: Callable[[Point], bool] = lambda _: True,
    special: Mapping[str, Sequence[Special]] | None = None,
) -> CaseSpace:
    """Return the cases of storing ordinary numbers, and the special kinds listed in ``numbers``."""
    return CaseSpace(
        _write,
        Axis("tokens", {"many tokens": 33, "one token": 1, "no tokens": 0}),
        _HEADS,
        _PAGE_SIZES,
        Axis("numbers", {"": "", **{name: name for name in numbers}}),
        *formats,
        _SCALES,
        strided={**WRITTEN, **dict.fromkeys(("key_scale", "value_scale"), "offset")},
        special=special,
        crossed={
            "tokens": ("many tokens",),
            "heads": ("", "odd sizes"),
            "page size": ("",),
            "numbers": ("",),
        },
        alone={"tokens": ("no tokens",)},
        # With one kv head both kinds of scales are the same. Slots and rounding are independent,
        # so page sizes are tested with ordinary numbers only.
        valid=lambda point, _: (
            not (point["scale"] and point["heads"][0] == 1)
            and not (point["numbers"] and point.labels["page size"])
            and valid(point)
        ),
    )


def _write(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    dims, numbers = _point_dims(point), point["numbers"]
    scales = [_scale(dims, numbers, dtype, generator) for _ in range(2)]
    placed = random_slots(point["tokens"], point["page size"], generator, least_pages=4)
    return _write_case(dims, scales, placed, numbers, dtype, generator)


reshape_and_cache_fp8_cases = _writing(
    _NUMBERS,
    _FORMATS,
    valid=lambda point: not (point["numbers"] == "saturated" and point["tokens"] == 1),
)
"""Numbers near FP8 numbers, subnormal, beyond the largest, and halfway between two."""

reshape_and_cache_int8_cases = _writing(
    ("small", "saturated", "ties"), special={"key": ("infinities",), "value": ("infinities",)}
)
"""Quotients within and beyond the range, small ones, and ties."""


def reshape_and_cache_fp8_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Build a typical step; scales are drawn first, so that all steps share the same scales."""
    generator = torch.Generator().manual_seed(seed)
    scales = [_scale(dims, "", dtype, generator) for _ in range(2)]
    placed = step_slots(num_tokens, int(dims["page_size"]), generator)
    return _write_case(dims, scales, placed, "", dtype, generator, f"{num_tokens} tokens")


reshape_and_cache_int8_sample = reshape_and_cache_fp8_sample


def _write_case(
    dims: Dims, scales: list[Tensor], placed: tuple[int, Tensor], numbers: str, dtype: torch.dtype,
    generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    num_pages, slots = placed
    shape = (len(slots), int(dims["num_kv_heads"]), int(dims["head_size"]))
    cache_dtype = _cache_dtype(dims)
    draw = _near_grid if cache_dtype.is_floating_point else _near_codes
    key, value = (draw(shape, numbers, dtype, cache_dtype, s, generator) for s in scales)
    keys, values = caches((num_pages, int(dims["page_size"]), *shape[1:]), cache_dtype)
    arguments = {
        "key": key,
        "value": value,
        "key_cache": keys,
        "value_cache": values,
        "slots": slots,
        "key_scale": scales[0],
        "value_scale": scales[1],
    }
    if cache_dtype.is_floating_point:
        arguments["cache_dtype"] = cache_dtype  # type: ignore[assignment]
    return Case(label, arguments, dims, reduction=0)


def _gathers(*formats: Axis) -> CaseSpace:
    return CaseSpace(
        _gather,
        Axis("batch", BATCHES),
        _HEADS,
        _PAGE_SIZES,
        Axis("spare", SPARE),
        *formats,
        _SCALES,
        strided={**GATHERED, "scale": "offset"},
        crossed={"batch": ("chunks",), "heads": ("odd sizes",), "page size": ("",)},
        # With one kv head both kinds of scales are the same. Scales and slots are independent, so
        # page sizes are tested with one scale only.
        valid=lambda point, _: (
            bool(point["batch"] or (point["spare"] and not point.labels["heads"]))
            and not (point["scale"] and point["heads"][0] == 1)
            and not (point["scale"] and (point.labels["page size"] or point["spare"]))
            and not (point["spare"] and point.labels["page size"])
        ),
    )


def _gather(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    dims = _point_dims(point)
    gathered = gathering(point, _cache_dtype(dims), generator)
    return _gather_case(gathered, _scale(dims, "", dtype, generator), dtype, dims)


gather_cache_fp8_cases, gather_cache_int8_cases = _gathers(_FORMATS), _gathers()
"""Whole sequences and chunks on shuffled pages, with one scale and with one per head."""


def gather_cache_fp8_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build the cache of one sequence of T tokens; the scale is drawn first."""
    generator = torch.Generator().manual_seed(seed)
    scale = _scale(dims, "", dtype, generator)
    gathered = typical_gathering(_cache_dtype(dims), dims, num_tokens, generator)
    return _gather_case(gathered, scale, dtype, dims, f"{num_tokens} tokens")


gather_cache_int8_sample = gather_cache_fp8_sample


def _gather_case(
    gathered: dict[str, Any], scale: Tensor, dtype: torch.dtype, dims: Dims, label: str = ""
) -> Case:
    num_tokens = gathered.pop("num_tokens")
    last = {"scale": scale, "num_tokens": num_tokens, "out_dtype": dtype}
    return Case(label, {**gathered, **last}, dims, reduction=0)


def _point_dims(point: Point) -> dict[str, Any]:
    cache_dtype = point.values.get("cache")
    format_dims = (
        {} if cache_dtype is None else {"cache_dtype": str(cache_dtype).rpartition(".")[2]}
    )
    return {**point_dims(point), **format_dims, "per_head": point["scale"]}


def _cache_dtype(dims: Dims) -> torch.dtype:
    """Return the cache dtype that ``dims`` request; ops for int8 have no such dim."""
    dtype: torch.dtype = getattr(torch, str(dims.get("cache_dtype", "int8")))
    return dtype


def _scale(dims: Dims, numbers: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw scales for which every dequantized number fits float16."""
    is_float = _cache_dtype(dims).is_floating_point
    shape = (int(dims["num_kv_heads"]) if dims["per_head"] else 1,)
    if numbers == "ties":
        return 2.0 ** torch.randint(-2 if is_float else -6, 1, shape, generator=generator).float()
    if not is_float:
        return uniform(shape, torch.float32, generator, 0.005, 0.05)
    scale = uniform(shape, torch.float32, generator, 0.2, 0.5)
    # The smallest numbers of e5m2 are subnormal in float16, unless they are scaled up.
    return scale * 64 if numbers == "subnormal" and dtype == torch.float16 else scale


def _near_grid(
    shape: tuple[int, ...], numbers: str, dtype: torch.dtype, cache_dtype: torch.dtype,
    scale: Tensor, generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Return numbers near the numbers of a float dtype, times ``scale``.

    Each number differs from a representable one by up to 1/50 of its size, while the nearest tie is
    at least 1/32 away; storing as bfloat16 changes a number by at most 1/256. Ties are exact,
    because their scales are powers of two. Quotients beyond the largest number are clamped anyway.
    """
    facts = torch.finfo(cache_dtype)
    spread = {"subnormal": facts.smallest_normal, "saturated": 1.2 * facts.max}.get(numbers, 4.0)
    drawn = normal(shape, torch.float32, generator, spread)
    if numbers == "saturated":
        drawn = drawn.clamp(-2.2 * facts.max, 2.2 * facts.max)  # times the scale it fits float16
    grid = drawn.clamp(-facts.max, facts.max).to(cache_dtype).float()
    if numbers == "ties":
        # Half a step away from zero, with the step of the number's binade.
        _, exponent = torch.frexp(grid)
        step = torch.ldexp(torch.full_like(grid, facts.eps), exponent - 1)
        moved = grid + torch.where(grid < 0, -step, step) / 2
    else:
        moved = grid * uniform(shape, torch.float32, generator, 0.98, 1.02)
    moved = torch.where(drawn.abs() > facts.max, drawn, moved)
    return (moved * scale[:, None]).to(dtype)


def _near_codes(
    shape: tuple[int, ...], numbers: str, dtype: torch.dtype, cache_dtype: torch.dtype,
    scale: Tensor, generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Return numbers near integers of int8, times ``scale``; ties are exact."""
    del cache_dtype
    wide = scale.double()[:, None]
    if numbers == "ties":
        return (signed_choice(_HALVES, shape, generator) * wide).to(dtype)
    x = (normal(shape, torch.float32, generator, _DEVIATIONS[numbers]) * wide).to(dtype)
    return clear_of_boundaries(x, x.double() / wide, lambda q: q.round().clamp(-128, 127))
