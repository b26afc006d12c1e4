"""The slopes of attention with linear biases. N heads.

Source: arXiv:2108.12409, section 3, and its program for numbers that are no power of 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, device: str, bias_max: float = 8.0) -> Tensor:
    """Return what a token of distance costs the score of each head, ``[N]`` float32.

    Those of a power of 2 are the powers of 2^(-bias_max/N). Others have the slopes of the next
    smaller power of 2, and every second one of twice as many heads.

    Args:
        bias_max: 8 in the paper; models for long contexts are trained with more.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    further = num_heads - power
    exponents = [bias_max * (i + 1) / power for i in range(power)]
    exponents += [bias_max / 2 * (2 * i + 1) / power for i in range(further)]
    return torch.tensor([2**-x for x in exponents], device=device)
