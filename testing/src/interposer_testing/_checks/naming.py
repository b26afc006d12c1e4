"""The check of what an indexer names. T tokens, L tokens of the longest sequence, X named tokens.

Scores that differ by less than their error may be taken for each other, so that positions are not
compared: what is named must score as the best do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from interposer_testing._checks.fault import Fault


def naming_faults(output: Any, scores: torch.Tensor, error: float, top_k: int) -> Iterator[Fault]:
    """Yield where ``output`` does not name the ``top_k`` best tokens of every row.

    Args:
        output: ``[T, top_k]`` int32, or ``[T, 0]`` where every row has at most ``top_k`` scores.
        scores: ``[T, L]`` float64; -inf is never named.
        error: how far a score may be off.
    """
    num_tokens, length = scores.shape
    if not isinstance(output, torch.Tensor) or output.dtype != torch.int32:
        found = getattr(output, "dtype", type(output).__name__)
        yield Fault("dtype", "output", f"it is {found}, must be a tensor of torch.int32")
        return
    width = 0 if length <= top_k else top_k
    if output.shape != (num_tokens, width):
        wanted = f"[{num_tokens}, {width}]"
        yield Fault("shape", "output", f"it is {[*output.shape]}, must be {wanted}")
        return
    for token, (row, known) in enumerate(zip(output.cpu().tolist(), scores, strict=True)):
        named = [position for position in row if position != -1]
        visible = int((known > -torch.inf).sum())
        where = f"token {token}"
        if not width:
            continue
        if row[: len(named)] != sorted(set(named)):
            yield Fault("value", where, f"{row} is not ascending positions that end in -1")
        elif len(named) != min(top_k, visible):
            count = min(top_k, visible)
            yield Fault("value", where, f"{len(named)} tokens are named, {count} can be")
        elif named and not 0 <= named[0] <= named[-1] < visible:
            yield Fault("value", where, f"{row} names a token that follows it")
        elif named:
            worst = min(named, key=lambda position: float(known[position]))
            least = float(known[:visible].sort(descending=True).values[len(named) - 1])
            if float(known[worst]) < least - 2 * error:
                score = f"scores {float(known[worst]):.6g}"
                yield Fault("value", where, f"{worst} is named and {score}, less than {least:.6g}")
