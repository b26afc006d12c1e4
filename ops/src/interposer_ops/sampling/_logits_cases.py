"""Rows of logits for the cases of sampling ops, and the cases of ``logits_softcap``.

A row is clear if rounding errors cannot change the decisions of sampling.

T tokens, B sequences or rows, V vocabulary.
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

# Margins far above rounding errors: of scaled logits with noise, whose float32 error is about 1e-6,
# and of probabilities summed over the vocabulary.
_MARGIN = 1e-3
_MASS_MARGIN = 1e-5
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
    """Draw rows of random logits, of repeated logits ("tied"), or mostly -inf ("ruled out")."""
    if kind == "tied":
        return torch.randint(-4, 4, shape, generator=generator).to(dtype)
    logits = normal(shape, dtype, generator, 4.0)
    if kind == "ruled out":
        is_masked = torch.rand(shape, generator=generator) < 0.9
        is_masked[:, shape[1] // 3] = False
        logits = logits.masked_fill(is_masked, float("-inf"))
    return logits


def num_rows(num_tokens: int) -> int:
    """Return the number of sequences that sample a token in a step of ``num_tokens``."""
    return len(typical_sequences(num_tokens))


def clear_rows(
    draw: Callable[[int], Tensor], is_clear: Callable[[Tensor], Tensor], rows: int
) -> Tensor:
    """Draw ``rows`` rows, and redraw each row until the row is clear.

    Args:
        draw: returns the requested number of rows.
        is_clear: returns a bool for every row.
    """
    logits = draw(rows)
    unclear = (~is_clear(logits)).nonzero()[:, 0]
    while len(unclear):
        logits[unclear] = draw(len(unclear))
        unclear = unclear[~is_clear(logits[unclear])]
    return logits


def clearly_truncated(
    scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the mask ``[B, V]`` of kept tokens, and ``[B]``: no token is near the threshold.

    Args:
        scaled: ``[B, V]`` float64.
        top_k, top_p, min_p: as in ``truncation_threshold``.
    """
    is_kept, is_kept_loosely = (
        scaled >= truncation_threshold(scaled, top_k, _shifted(top_p, p), _scaled(min_p, m)) - slack
        for p, m, slack in ((-_MASS_MARGIN, 1 + _MARGIN, 0), (_MASS_MARGIN, 1 - _MARGIN, _MARGIN))
    )
    return is_kept, (is_kept == is_kept_loosely).all(-1)


def clearly_won(values: Tensor) -> Tensor:
    """Return whether the largest value of each row of ``[B, V]`` exceeds the others clearly."""
    if values.shape[-1] == 1:
        return torch.ones(len(values), dtype=torch.bool)
    best = values.topk(2, -1).values
    return best[:, 0] - best[:, 1] > _MARGIN


def _shifted(probability: Tensor | None, change: float) -> Tensor | None:
    """Add ``change`` to the probabilities strictly between 0 and 1."""
    if probability is None:
        return None
    is_inside = (probability > 0) & (probability < 1)
    return torch.where(is_inside, probability + change, probability)


def _scaled(ratio: Tensor | None, factor: float) -> Tensor | None:
    """Multiply the ratios strictly between 0 and 1 by ``factor``."""
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
# Deviation of the logits in units of the cap: tanh is curved, linear, 1, or 0.
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
"""Logits far below, near and far above the cap."""


def logits_softcap_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make the logits of T tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["vocab_size"]))
    logits = normal_numbers(shape, dtype, generator, deviation=10.0)
    return _case(logits, 30.0, f"{num_tokens} tokens")


def _case(logits: Tensor, cap: float, label: str) -> Case:
    # Division and multiplication round once each, and tanh has an error of few units in the last
    # place: in total eight half units of the largest result.
    return Case(
        label,
        {"logits": logits, "cap": cap},
        {"vocab_size": logits.shape[1]},
        reduction=4,
        magnitude=min(cap, peak(logits)),
    )
