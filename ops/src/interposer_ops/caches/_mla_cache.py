"""The paged cache of multi-head latent attention: one latent row of each token, for all heads.

Dimensions: T tokens, C latent size, R rotated size, P pages, S page size.
"""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op

_CASES = "interposer_ops.caches._mla_cache_cases"


@standard_op(
    "write_latent_cache",
    cases=_CASES,
    batch_invariant=True,
    mutates=("cache",),
    tolerance=Tolerance(roundings=0),
    batched=("latent", "rope_key", "slots"),
)
def write_latent_cache(
    latent: torch.Tensor, rope_key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store each token's latent vector, and its rotated key behind it, in its slot.

    Args:
        latent: ``[T, C]``, any float dtype; rows may skip memory.
        rope_key: ``[T, R]``, dtype of ``latent``; rows may skip memory.
        cache: ``[P, S, C + R]``, dtype of ``latent``, written in place; pages may skip memory.
        slots: ``[T]`` int64, page * S + offset, distinct.
    Dims: latent_size, rotary_size, page_size.
    Source: arXiv:2405.04434 (multi-head latent attention).
    """
    page_size = cache.shape[1]
    cache[slots // page_size, slots % page_size] = torch.cat((latent, rope_key), dim=-1)
