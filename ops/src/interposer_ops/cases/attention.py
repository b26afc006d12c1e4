"""Cases."""
from __future__ import annotations
from collections.abc import Iterator
import torch
from interposer import Case
def reshape_and_cache_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    return iter(())
def paged_attention_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    return iter(())
