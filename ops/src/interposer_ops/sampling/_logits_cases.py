"""Rows of logits for the cases of sampling, and cases of capped ones.

Rows are clear if rounding cannot change what is decided by them. T tokens, B sequences or rows, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.sampling._truncation import truncation_threshold
from interposer_testing.cases import Axis, CaseSpace, Point, normal, peak
from interposer_testing.workload import typical_sequences

_MARGIN = 1e-3  # of scaled logits with noise, which float32 rounds by about 1e-6
_MASS_MARGIN = 1e-5  # of probabilities summed over the vocabulary
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
) -> Tensor:
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


def clear_rows(
    draw: Callable[[int], Tensor], is_clear: Callable[[Tensor], Tensor], rows: int
) -> Tensor:
    """Return rows that are all clear, drawing again those that are not.

    Args:
        draw: returns as many rows as it is told.
        is_clear: returns a bool for every row.
    """
    drawn = draw(rows)
    unclear = (~is_clear(drawn)).nonzero()[:, 0]
    while len(unclear):
        drawn[unclear] = draw(len(unclear))
        unclear = unclear[~is_clear(drawn[unclear])]
    return drawn


def clearly_truncated(
    scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what each row keeps, ``[B, V]``, and whether no token is near the edge of it, ``[B]``.

    Args:
        scaled: ``[B, V]`` float64, and the truncations, as of ``truncation_threshold``.
    """
    kept, kept_loosely = (
        scaled >= truncation_threshold(scaled, top_k, _nudged(top_p, p), _scaled(min_p, m)) - slack
        for p, m, slack in ((-_MASS_MARGIN, 1 + _MARGIN, 0), (_MASS_MARGIN, 1 - _MARGIN, _MARGIN))
    )
    return kept, (kept == kept_loosely).all(-1)


def clearly_won(values: Tensor) -> Tensor:
    """Say of each row, ``[B, V]`` float64, whether its largest value stands clear of the others."""
    if values.shape[-1] == 1:
        return torch.ones(len(values), dtype=torch.bool)
    best = values.topk(2, -1).values
    return best[:, 0] - best[:, 1] > _MARGIN


def _nudged(bound: Tensor | None, change: float) -> Tensor | None:
    """Return ``bound`` changed where it lies inside (0, 1); 0 and 1 are exact."""
    if bound is None:
        return None
    return torch.where((bound > 0) & (bound < 1), bound + change, bound)


def _scaled(ratio: Tensor | None, factor: float) -> Tensor | None:
    """Return ``ratio`` times ``factor`` where it lies inside (0, 1): its logarithm is compared."""
    if ratio is None:
        return None
    return torch.where((ratio > 0) & (ratio < 1), ratio * factor, ratio)


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


def _case(logits: Tensor, cap: float, label: str) -> Case:
    # Quotient and product are rounded once, and tanh is right to a few units of the last place:
    # in all eight half units of the largest result.
    return Case(
        label,
        {"logits": logits, "cap": cap},
        {"vocab_size": logits.shape[1]},
        reduction=4,
        magnitude=min(cap, peak(logits)),
    )
