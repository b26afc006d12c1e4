"""Cases."""
from __future__ import annotations
from collections.abc import Iterator
import torch
from interposer import Case
def rotary_embedding_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    return iter(())
