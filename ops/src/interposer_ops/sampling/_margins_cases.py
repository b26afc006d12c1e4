"""Rows of which no decision can be changed by rounding. B rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch

from interposer_ops.sampling._truncation import truncation_threshold

_MARGIN = 1e-3  # of scaled logits with noise, which float32 rounds by about 1e-6
_MASS_MARGIN = 1e-5  # of probabilities summed over the vocabulary


def clear_rows(
    draw: Callable[[int], torch.Tensor], is_clear: Callable[[torch.Tensor], torch.Tensor], rows: int
) -> torch.Tensor:
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
    scaled: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each row keeps, ``[B, V]``, and whether no token is near the edge of it, ``[B]``.

    Args:
        scaled: ``[B, V]`` float64, and the truncations, as of ``truncation_threshold``.
    """
    kept, kept_loosely = (
        scaled >= truncation_threshold(scaled, top_k, _nudged(top_p, p), _scaled(min_p, m)) - slack
        for p, m, slack in ((-_MASS_MARGIN, 1 + _MARGIN, 0), (_MASS_MARGIN, 1 - _MARGIN, _MARGIN))
    )
    return kept, (kept == kept_loosely).all(-1)


def clearly_won(values: torch.Tensor) -> torch.Tensor:
    """Say of each row, ``[B, V]`` float64, whether its largest value stands clear of the others."""
    if values.shape[-1] == 1:
        return torch.ones(len(values), dtype=torch.bool)
    best = values.topk(2, -1).values
    return best[:, 0] - best[:, 1] > _MARGIN


def _nudged(bound: torch.Tensor | None, change: float) -> torch.Tensor | None:
    """Return ``bound`` changed where it lies inside (0, 1); 0 and 1 are exact."""
    if bound is None:
        return None
    return torch.where((bound > 0) & (bound < 1), bound + change, bound)


def _scaled(ratio: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    """Return ``ratio`` times ``factor`` where it lies inside (0, 1): its logarithm is compared."""
    if ratio is None:
        return None
    return torch.where((ratio > 0) & (ratio < 1), ratio * factor, ratio)
