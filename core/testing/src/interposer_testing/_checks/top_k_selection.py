"""The check of the top k tokens that an indexer selects. T tokens, L longest sequence.

The order of scores is arbitrary within the error of a score. So the check does not compare
positions; every selected token must score about as high as the k-th best token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from interposer_testing._checks.fault import Fault


def selection_faults(
    output: Any, scores: torch.Tensor, error: float, top_k: int
) -> Iterator[Fault]:
    """Check that every row of ``output`` contains the positions of the ``top_k`` best tokens.

    Args:
        output: ``[T, top_k]`` int32, ascending and padded with -1; ``[T, 0]`` if no row has more
            than ``top_k`` scores.
        scores: ``[T, L]`` float64; tokens with -inf must not be selected.
        error: error bound of a score.
    """
    num_tokens, length = scores.shape
    if not isinstance(output, torch.Tensor) or output.dtype != torch.int32:
        actual = getattr(output, "dtype", type(output).__name__)
        yield Fault("dtype", "output", f"it is {actual}, must be a tensor of torch.int32")
        return
    width = 0 if length <= top_k else top_k
    if output.shape != (num_tokens, width):
        shape = f"[{num_tokens}, {width}]"
        yield Fault("shape", "output", f"it is {[*output.shape]}, must be {shape}")
        return
    for token, (row, row_scores) in enumerate(zip(output.cpu().tolist(), scores, strict=True)):
        selected = [position for position in row if position != -1]
        num_visible = int((row_scores > -torch.inf).sum())
        where = f"token {token}"
        if not width:
            continue
        num_expected = min(top_k, num_visible)
        if row[: len(selected)] != sorted(set(selected)):
            yield Fault("value", where, f"{row} must be ascending positions, padded with -1")
        elif len(selected) != num_expected:
            reason = f"{len(selected)} tokens are selected, must be {num_expected}"
            yield Fault("value", where, reason)
        elif selected and not 0 <= selected[0] <= selected[-1] < num_visible:
            yield Fault("value", where, f"{row} contains a later token, which must be masked")
        elif selected:
            worst = min(selected, key=lambda position: float(row_scores[position]))
            score = float(row_scores[worst])
            best_scores = row_scores[:num_visible].sort(descending=True).values
            min_score = float(best_scores[len(selected) - 1])
            # The scores of both tokens may be off by ``error``.
            if score < min_score - 2 * error:
                reason = f"token {worst} is selected, but its score {score:.6g} is below"
                yield Fault("value", where, f"{reason} the {top_k} best, from {min_score:.6g}")
