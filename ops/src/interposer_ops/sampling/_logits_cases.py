"""Rows of logits for the cases of sampling. B sequences, V vocabulary."""

from __future__ import annotations

import torch

from interposer_testing.cases import normal
from interposer_testing.workload import typical_sequences

LOGIT_SHAPES = {
    "many rows": (9, 257),
    "one row": (1, 64),
    "odd vocabulary": (3, 1003),
    "a word and one": (5, 33),
    "one token": (2, 1),
    "no rows": (0, 64),
    "wide": (2, 32000),
}
LOGITS = {"": "random", "tied": "tied", "ruled out": "ruled out"}


def random_logits(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return rows of random numbers, of few numbers that repeat, or mostly of minus infinity."""
    if kind == "tied":
        return torch.randint(-4, 4, shape, generator=generator).to(dtype)
    logits = normal(shape, dtype, generator, 4.0)
    if kind == "ruled out":
        dropped = torch.rand(shape, generator=generator) < 0.9
        dropped[:, shape[1] // 3] = False
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits


def num_rows(num_tokens: int) -> int:
    """Return how many tokens are sampled in a step of ``num_tokens``: one for each sequence."""
    return len(typical_sequences(num_tokens))
