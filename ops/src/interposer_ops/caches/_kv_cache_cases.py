"""Test cases of the paged cache.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages of the longest
sequence, P pages, S page size, C latent size, R rotary size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops.caches._paging_cases import SPARE_PAGES, attention_dims, caches, scattered
from interposer_testing.cases import Axis, CaseSpace, Point, Special, Strides, normal
from interposer_testing.workload import typical_sequences

HEADS = {  # K, D
    "": (2, 64),
    "head size 128 of one kv head": (1, 128),
    "odd sizes": (3, 20),
    "head size 80": (2, 80),
    "head size 256": (2, 256),
    "head size 1": (5, 1),
}
PAGE_SIZES = {"": 16, "page of 4": 4, "page of one": 1, "page of 12": 12}
# None fills every slot of the cache.
TOKENS = {"many tokens": 33, "one token": 1, "every slot": None, "no tokens": 0}
# (first position, number of tokens) of each gathered sequence.
BATCHES = {
    "one sequence": ((0, 9),),
    "several": ((0, 9), (0, 7), (0, 12), (0, 1)),
    "around page edges": ((0, 15), (0, 16), (0, 17), (0, 3), (0, 4), (0, 5)),
    "chunks": ((5, 8), (16, 4), (11, 13)),
    "some without a token": ((0, 0), (3, 6), (7, 0), (0, 5), (0, 0)),
    "no sequences": (),
}
SPARE = {"": 0, "rows beyond the tokens": 5}
SPECIALS: tuple[Special, ...] = ("infinities", "NaN", "subnormals", "negative zeros")
WRITTEN: dict[str, Strides] = {
    **dict.fromkeys(("key", "value", "key_cache", "value_cache"), "outer"),
    "slots": "offset",
}
GATHERED: dict[str, Strides] = {
    **{"cache": "outer", "page_table": "rows"},
    **dict.fromkeys(("seq_lens", "starts"), "offset"),
}
_COPIED = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def _reshape_and_cache(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (kv_heads, head_size), page_size = point["heads"], point["page size"]
    num_pages, slots = random_slots(point["tokens"], page_size, generator)
    shape = (len(slots), kv_heads, head_size)
    key, value = (normal(shape, dtype, generator) for _ in range(2))
    dims = attention_dims(2 * kv_heads, kv_heads, head_size, page_size)
    return _write_case(key, value, slots, num_pages, dims)


reshape_and_cache_cases = CaseSpace(
    _reshape_and_cache,
    Axis("tokens", TOKENS),
    Axis("heads", HEADS),
    Axis("page size", PAGE_SIZES),
    strided=WRITTEN,
    special={"key": SPECIALS, "value": SPECIALS},
    crossed={
        "tokens": ("many tokens",),
        "heads": ("", "odd sizes"),
        "page size": ("", "page of one"),
    },
    alone={"tokens": ("no tokens",)},
)
"""Tokens for scattered slots; unused slots hold NaN and must keep NaN."""


def reshape_and_cache_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build a typical step; values are a strided slice of the QKV projection."""
    generator = torch.Generator().manual_seed(seed)
    names = ("num_heads", "num_kv_heads", "head_size", "page_size")
    heads, kv_heads, head_size, page_size = (int(dims[name]) for name in names)
    num_pages, slots = step_slots(num_tokens, page_size, generator)
    projection = normal((num_tokens, heads + 2 * kv_heads, head_size), dtype, generator)
    _, key, value = projection.split((heads, kv_heads, kv_heads), dim=1)
    label = f"{num_tokens} tokens"
    return _write_case(key.contiguous(), value, slots, num_pages, dims, label)


def _write_case(
    key: Tensor, value: Tensor, slots: Tensor, num_pages: int, dims: Dims, label: str = ""
) -> Case:
    keys, values = caches((num_pages, int(dims["page_size"]), *key.shape[1:]), key.dtype)
    write_arguments = {"key_cache": keys, "value_cache": values, "slots": slots}
    return Case(label, {"key": key, "value": value, **write_arguments}, dims, reduction=0)


def _gather_cache(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return Case("", gathering(point, dtype, generator), point_dims(point), reduction=0)


gather_cache_cases = CaseSpace(
    _gather_cache,
    Axis("batch", BATCHES),
    Axis("heads", {label: HEADS[label] for label in ("", "odd sizes")}),
    Axis("page size", PAGE_SIZES),
    Axis("spare", SPARE),
    dtypes=_COPIED,
    strided=GATHERED,
    crossed={"batch": ("chunks",), "heads": ("", "odd sizes"), "page size": ("", "page of one")},
    # Without sequences the result is all zeros, whatever the heads and pages: one case is enough.
    valid=lambda point, _: (
        bool(point["batch"])
        or bool(point["spare"] and not (point.labels["heads"] or point.labels["page size"]))
    ),
)
"""Whole sequences and chunks on shuffled pages; slots that must not be read hold NaN."""


def gather_cache_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build the cache of one sequence of T tokens, as for the context of a prompt's chunk."""
    generator = torch.Generator().manual_seed(seed)
    arguments = typical_gathering(dtype, dims, num_tokens, generator)
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)


_LATENT_SIZES = {  # C, R
    "": (128, 64),
    "of DeepSeek-V3": (512, 64),
    "odd sizes": (37, 6),
    "small": (16, 2),
    "rotated part wider": (16, 64),
}


def _write_latent_cache(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (latent_size, rotary_size), page_size = point["sizes"], point["page size"]
    num_pages, slots = random_slots(point["tokens"], page_size, generator)
    latent = normal((len(slots), latent_size), dtype, generator)
    rope_key = normal((len(slots), rotary_size), dtype, generator)
    dims = {"latent_size": latent_size, "rotary_size": rotary_size, "page_size": page_size}
    return _latent_case(latent, rope_key, num_pages, slots, dims, "")


write_latent_cache_cases = CaseSpace(
    _write_latent_cache,
    Axis("tokens", TOKENS),
    Axis("sizes", _LATENT_SIZES),
    Axis("page size", {**PAGE_SIZES, "page of 64": 64}),
    strided={"latent": "rows", "rope_key": "rows", "cache": "outer", "slots": "offset"},
    special={"latent": SPECIALS, "rope_key": SPECIALS},
    crossed={
        "tokens": ("many tokens",),
        "sizes": ("", "odd sizes"),
        "page size": ("", "page of one"),
    },
    alone={"tokens": ("no tokens",)},
)
"""Tokens for scattered slots; unused slots hold NaN and must keep NaN."""


def write_latent_cache_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build a contiguous latent part, and a rotary part that is a slice of the projection."""
    generator = torch.Generator().manual_seed(seed)
    latent_size, rotary_size = int(dims["latent_size"]), int(dims["rotary_size"])
    num_pages, slots = step_slots(num_tokens, int(dims["page_size"]), generator)
    projection = normal((num_tokens, latent_size + rotary_size), dtype, generator)
    latent, rope_key = projection.split((latent_size, rotary_size), dim=1)
    label = f"{num_tokens} tokens"
    return _latent_case(latent.contiguous(), rope_key, num_pages, slots, dims, label)


def _latent_case(
    latent: Tensor, rope_key: Tensor, num_pages: int, slots: Tensor, dims: Dims, label: str
) -> Case:
    shape = (num_pages, int(dims["page_size"]), latent.shape[1] + rope_key.shape[1])
    cache = latent.new_full(shape, torch.nan)
    arguments = {"latent": latent, "rope_key": rope_key, "cache": cache, "slots": slots}
    return Case(label, arguments, dims, reduction=0)


def point_dims(point: Point) -> dict[str, Any]:
    """Return the dims of ops that only read or write a cache."""
    kv_heads, head_size = point["heads"]
    return {"num_kv_heads": kv_heads, "head_size": head_size, "page_size": point["page size"]}


def random_slots(
    num_tokens: int | None, page_size: int, generator: torch.Generator, least_pages: int = 6
) -> tuple[int, Tensor]:
    """Return the number of pages, and random slots for ``num_tokens`` tokens, or for all slots."""
    num_pages = max(least_pages, -(-(num_tokens or 0) // page_size))
    return num_pages, torch.randperm(num_pages * page_size, generator=generator)[:num_tokens]


def step_slots(num_tokens: int, page_size: int, generator: torch.Generator) -> tuple[int, Tensor]:
    """Return the number of pages, and the slots of the new tokens of a typical step."""
    sequences = typical_sequences(num_tokens)
    table, cached = scattered([tokens for tokens, _ in sequences], page_size, generator)
    ends = torch.tensor([tokens for tokens, _ in sequences]).cumsum(0).tolist()
    newest = [cached[end - new : end] for end, (_, new) in zip(ends, sequences, strict=True)]
    return table.numel() + SPARE_PAGES, torch.cat(newest)


def gathering(point: Point, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Build the arguments of ``gather_cache`` for a cache of ``dtype``."""
    shape = (point["page size"], *point["heads"])
    return _gathering(point["batch"], point["spare"], shape, dtype, generator)


def typical_gathering(
    dtype: torch.dtype, dims: Dims, num_tokens: int, generator: torch.Generator
) -> dict[str, Any]:
    """Build the arguments of ``gather_cache`` for one sequence."""
    shape = (int(dims["page_size"]), int(dims["num_kv_heads"]), int(dims["head_size"]))
    return _gathering(((0, num_tokens),), 0, shape, dtype, generator)


def _gathering(
    batch: tuple[tuple[int, int], ...],
    spare: int,
    page_shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Build ``gather_cache`` arguments for one chunk (start, length) per sequence."""
    page_size = page_shape[0]
    table, slots = scattered([start + length for start, length in batch], page_size, generator)
    cache, _ = caches((table.numel() + SPARE_PAGES, *page_shape), dtype)
    begin, deviation = 0, 1.0 if dtype.is_floating_point else 40.0
    for start, length in batch:
        read_slots = slots[begin + start : begin + start + length]
        stored = normal((length, *page_shape[1:]), dtype, generator, deviation)
        cache[read_slots // page_size, read_slots % page_size] = stored
        begin += start + length
    lengths = torch.tensor([length for _, length in batch], dtype=torch.int64)
    return {
        "cache": cache,
        "page_table": table,
        "seq_lens": lengths,
        "starts": torch.tensor([start for start, _ in batch], dtype=torch.int64),
        "num_tokens": int(lengths.sum()) + spare,
    }
