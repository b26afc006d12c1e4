"""The function. T tokens, V entries, H hidden size."""

from __future__ import annotations

import torch


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``weight`` ``[V, H]`` that ``token_ids`` name, ``[T, H]``."""
    return weight.index_select(0, token_ids)
