"""Rows of logits for the cases of sampling, and cases of capped ones.

T tokens, B sequences, V vocabulary.
"""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, normal, peak
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


_CAPPED_SHAPES = {
    "many rows": (17, 129),
    "one row": (1, 1000),
    "odd width": (3, 127),
    "one element": (1, 1),
    "wide": (2, 8193),
    "no rows": (0, 64),
}
# Of the logits, in units of the cap: in the linear part, at its end, where tanh is 1.
_SCALES = {"": 1.0, "small": 1e-2, "large": 30.0, "zeros": 0.0}


def _softcap(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    logits = normal(point["shape"], dtype, generator, point["scale"] * point["cap"])
    return _case(logits, point["cap"], "")


logits_softcap_cases = CaseSpace(
    _softcap,
    Axis("shape", _CAPPED_SHAPES),
    Axis("scale", _SCALES),
    Axis("cap", {"": 30.0, "cap of 50": 50.0, "cap of 1": 1.0}),
    strided={"logits": "rows"},
    special={"logits": ("infinities", "NaN", "subnormals", "negative zeros")},
    crossed={"shape": ("many rows", "odd width"), "scale": ("",)},
    alone={"shape": ("no rows",)},
    valid=lambda point, _: not (point.labels["scale"] == "zeros" and point.labels["cap"]),
)
"""Logits well below, about and far beyond the cap."""


def logits_softcap_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return the logits of T tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["vocab_size"]))
    logits = normal_numbers(shape, dtype, generator, deviation=10.0)
    return _case(logits, 30.0, f"{num_tokens} tokens")


def _case(logits: torch.Tensor, cap: float, label: str) -> Case:
    # Quotient and product are rounded once, and tanh is right to a few units of the last place:
    # in all eight half units of the largest result.
    return Case(
        label,
        {"logits": logits, "cap": cap},
        {"vocab_size": logits.shape[1]},
        reduction=4,
        magnitude=min(cap, peak(logits)),
    )
