"""Lookup of rows in a table by torch's own function. T tokens, V rows, H hidden size."""

from __future__ import annotations

from torch import Tensor

from interposer_ops._declare import torch_kernel


@torch_kernel("embedding", "index_select")
def embedding_index_select(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Compute ``embedding`` without the checks of ``functional.embedding``."""
    return weight.index_select(0, token_ids)
