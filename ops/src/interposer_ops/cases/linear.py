"""Cases."""
from __future__ import annotations
from collections.abc import Iterator
import torch
from interposer import Case
def linear_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    return iter(())
def embedding_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    return iter(())
