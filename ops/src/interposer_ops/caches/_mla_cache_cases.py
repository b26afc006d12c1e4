"""Cases of the latent cache. T tokens, C latent size, R rotated size, P pages, S page size."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops.caches._kv_cache_cases import PAGE_SIZES, TOKENS, step_slots
from interposer_testing.cases import Axis, CaseSpace, Point, normal

_SIZES = {  # C, R
    "": (128, 64),
    "of DeepSeek-V3": (512, 64),
    "odd sizes": (37, 6),
    "small": (16, 2),
    "rotated part wider": (16, 64),
}


def _write_latent_cache(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (latent_size, rotary_size), page_size = point["sizes"], point["page size"]
    tokens = point["tokens"]
    num_pages = max(6, -(-(tokens or 0) // page_size))
    num_slots = num_pages * page_size
    count = num_slots if tokens is None else tokens
    slots = torch.randperm(num_slots, generator=generator)[:count]
    latent = normal((count, latent_size), dtype, generator)
    rope_key = normal((count, rotary_size), dtype, generator)
    dims = {"latent_size": latent_size, "rotary_size": rotary_size, "page_size": page_size}
    return _case(latent, rope_key, num_pages, slots, dims, "")


write_latent_cache_cases = CaseSpace(
    _write_latent_cache,
    Axis("tokens", TOKENS),
    Axis("sizes", _SIZES),
    Axis("page size", {**PAGE_SIZES, "page of 64": 64}),
    strided={"latent": "rows", "rope_key": "rows", "cache": "outer", "slots": "offset"},
    special={
        "latent": ("infinities", "NaN", "subnormals", "negative zeros"),
        "rope_key": ("infinities", "NaN", "subnormals", "negative zeros"),
    },
    crossed={
        "tokens": ("many tokens",),
        "sizes": ("", "odd sizes"),
        "page size": ("", "page of one"),
    },
    alone={"tokens": ("no tokens",)},
)
"""Tokens for scattered slots; slots that get no token hold NaN and must keep it."""


def write_latent_cache_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return a latent part that was normalised and a part cut out of the projection."""
    generator = torch.Generator().manual_seed(seed)
    latent_size, rotary_size = int(dims["latent_size"]), int(dims["rotary_size"])
    num_pages, slots = step_slots(num_tokens, int(dims["page_size"]), generator)
    projection = normal((num_tokens, latent_size + rotary_size), dtype, generator)
    latent, rope_key = projection.split((latent_size, rotary_size), dim=1)
    label = f"{num_tokens} tokens"
    return _case(latent.contiguous(), rope_key, num_pages, slots, dims, label)


def _case(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    num_pages: int,
    slots: torch.Tensor,
    dims: Dims,
    label: str,
) -> Case:
    shape = (num_pages, int(dims["page_size"]), latent.shape[1] + rope_key.shape[1])
    arguments = {
        "latent": latent,
        "rope_key": rope_key,
        "cache": latent.new_full(shape, torch.nan),
        "slots": slots,
    }
    return Case(label, arguments, dims, reduction=0)
