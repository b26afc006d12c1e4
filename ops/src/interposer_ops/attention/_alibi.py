"""Slopes of attention with linear biases (ALiBi). N heads.

Source: arXiv:2108.12409, section 3, and the authors' program for head counts that are no power of
    2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, device: str, bias_max: float = 8.0) -> Tensor:
    """Return the ALiBi slope of each head, ``[N]`` float32: score decrease per token of distance.

    If N is a power of 2, the slopes are the powers of 2^(-bias_max/N). Else: the slopes of the next
    smaller power of 2, then every second slope of twice that power.

    Args:
        bias_max: 8 in the paper; some long-context models use larger values.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    num_remaining = num_heads - power
    exponents = [bias_max * (i + 1) / power for i in range(power)]
    exponents += [bias_max / 2 * (2 * i + 1) / power for i in range(num_remaining)]
    return torch.tensor([2**-x for x in exponents], device=device)
