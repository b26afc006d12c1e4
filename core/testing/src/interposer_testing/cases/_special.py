"""Special values such as NaN and infinities in the arguments of a case."""

from __future__ import annotations

from typing import Literal, get_args

import torch

Special = Literal["infinities", "NaN", "subnormals", "negative zeros"]
SPECIALS: tuple[Special, ...] = get_args(Special)


def with_special(tensor: torch.Tensor, special: Special) -> torch.Tensor:
    """Copy a float tensor and put special values into some rows.

    - infinities: +inf at the end of the first row, -inf at the start of the last row.
    - NaN: in the middle of the middle row.
    - subnormals: the whole last row.
    - negative zeros: every third element.

    Args:
        tensor: ``[..., H]`` with at least one element.
    """
    rows = tensor.clone(memory_format=torch.contiguous_format)
    flat = rows.view(-1, rows.shape[-1]) if rows.ndim else rows.view(1, 1)
    match special:
        case "infinities":
            flat[0, -1] = torch.inf
            flat[-1, 0] = -torch.inf
        case "NaN":
            flat[flat.shape[0] // 2, flat.shape[1] // 2] = torch.nan
        case "subnormals":
            facts = torch.finfo(rows.dtype)
            steps = torch.arange(1, flat.shape[1] + 1, device=rows.device) % 7 - 3
            flat[-1] = (steps * (facts.smallest_normal * facts.eps)).to(rows.dtype)
        case "negative zeros":
            rows.view(-1)[::3] = -0.0
    return rows
