"""Cases of the rotary embedding. T tokens, N heads, K kv heads, D head size, R rotated size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from interposer import Case
from interposer.op import Dims
from interposer_ops.cases.magnitude import peak
from interposer_ops.cases.numbers import normal_numbers

__all__ = ["rotary_embedding_cases", "rotary_embedding_sample"]

# T, N, K, D, R.
_SIZES = {
    "one token": (1, 4, 4, 64, 64),
    "many tokens": (33, 4, 2, 64, 64),
    "one kv head": (5, 8, 1, 32, 32),
    "odd head counts": (3, 5, 3, 64, 64),
    "head size 80": (3, 4, 2, 80, 80),
    "head size 128": (3, 4, 2, 128, 128),
    "smallest": (2, 1, 1, 2, 2),
    "partial": (7, 4, 2, 64, 16),
    "partial of head size 80": (3, 4, 2, 80, 32),
    "no tokens": (0, 4, 2, 64, 64),
}


def rotary_embedding_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield several sizes, and heads cut out of one fused projection."""
    generator = torch.Generator().manual_seed(seed)
    for label, (tokens, heads, kv_heads, head_size, rotary_size) in _SIZES.items():
        query = torch.randn(tokens, heads, head_size, generator=generator)
        key = torch.randn(tokens, kv_heads, head_size, generator=generator)
        yield _case(label, query.to(dtype), key.to(dtype), rotary_size, generator)
    fused = torch.randn(6, 4 + 2 + 2, 64, generator=generator).to(dtype)
    query, key, _ = fused.split((4, 2, 2), dim=1)
    yield _case("slices of one projection", query, key, 64, generator)
    yield _case("slices of one projection, partial", query, key, 32, generator)


def rotary_embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return 16 heads and 4 kv heads cut out of one projection; the dims do not count them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, 16 + 4 + 4, int(dims["head_size"]))
    query, key, _ = normal_numbers(shape, dtype, generator).split((16, 4, 4), dim=1)
    return _case(f"{num_tokens} tokens", query, key, int(dims["rotary_size"]), generator)


def _case(
    label: str,
    query: torch.Tensor,
    key: torch.Tensor,
    rotary_size: int,
    generator: torch.Generator,
) -> Case:
    head_size = query.shape[-1]
    angles = 100 * torch.rand(query.shape[0], rotary_size // 2, generator=generator)
    largest = max(peak(query), peak(key))
    return Case(
        label,
        {"query": query, "key": key, "cos": angles.cos(), "sin": angles.sin()},
        {"head_size": head_size, "rotary_size": rotary_size},
        reduction=2,
        magnitude=2 * largest,
        # The two products cancel where the result is small.
        rounded=largest,
    )
