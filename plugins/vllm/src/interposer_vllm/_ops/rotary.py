"""Rotary embedding by vLLM's op.

Shapes: T tokens, N heads, K kv heads, D head size, R rotated size.
"""

from __future__ import annotations

import torch

from interposer_vllm._ops.library import op

__all__ = ["rotary_embedding", "rotary_embedding_interleaved"]


def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key; dimensions i and i + R/2 form a pair (NeoX)."""
    return _rotated(query, key, cos, sin, halves=True)


def rotary_embedding_interleaved(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key; dimensions 2 i and 2 i + 1 form a pair (GPT-J)."""
    return _rotated(query, key, cos, sin, halves=False)


def _rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, halves: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate copies of query and key, since vLLM's op works in place."""
    rotated = [t.clone(memory_format=torch.contiguous_format) for t in (query, key)]
    if len(query):
        # vLLM looks angles up by position. Here row t of the table has the angles of token t.
        table = torch.cat((cos, sin), dim=-1)
        positions = torch.arange(len(query), device=query.device)
        flat = (t.flatten(1) for t in rotated)
        op("_C::rotary_embedding")(positions, *flat, query.shape[-1], table, halves)
    return rotated[0], rotated[1]
