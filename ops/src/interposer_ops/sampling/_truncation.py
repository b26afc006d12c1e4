"""Temperature, top-k, top-p and min-p.

B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNITS = 2**52  # fixed-point units in a probability of 1


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return ``(logits - max) / temperature``, ``[B, V]``: at most 0, and 0 at the likeliest token.

    The maximum is subtracted first, so that no positive temperature overflows the result. Rows of
    temperature 0 are divided by 1.
    """
    divisor = torch.where(temperature > 0, temperature, 1).to(logits.dtype)
    return (logits - logits.amax(-1, keepdim=True)) / divisor[:, None]


def truncation_threshold(
    scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Return the smallest scaled logit that top-k, top-p and min-p keep, ``[B, 1]``.

    A token is kept if its value reaches the threshold. Equal tokens are kept or dropped together.
    The truncations apply in this order:

    - top-k keeps the k likeliest; 0 keeps all.
    - top-p renormalises the tokens that top-k keeps, and keeps a token if all likelier tokens
      together have a probability below p; 1 keeps all.
    - min-p keeps tokens that are at least p times as likely as the likeliest token; 0 keeps all.

    Each truncation keeps the likeliest token. None skips a truncation for all rows. The vocabulary
    is sorted only for top-k and top-p.

    Args:
        scaled: ``[B, V]``, result of ``temper``, float32 or wider.
        top_k: ``[B]`` int64, not negative.
        top_p: ``[B]``, float, in [0, 1].
        min_p: ``[B]``, float, in [0, 1].
    """
    batch_size, num_tokens = scaled.shape
    threshold = scaled.new_full((batch_size, 1), float("-inf"))
    if top_k is not None or top_p is not None:
        ordered = scaled.sort(dim=-1, descending=True).values
        if top_k is not None:
            last = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens) - 1
            threshold = ordered.gather(-1, last[:, None])
        if top_p is not None:
            limit = top_p.to(scaled.dtype)[:, None]
            mass = ordered.masked_fill(ordered < threshold, float("-inf")).softmax(-1)
            # Fixed-point sums: a sum of floats depends on the order of terms, which differs
            # between devices.
            units = (mass * _UNITS).to(torch.int64)
            likelier = (units.cumsum(-1) - units).to(scaled.dtype) / _UNITS
            is_kept = (likelier < limit) | (limit >= 1)
            smallest_kept = torch.where(is_kept, ordered, 0).amin(-1, keepdim=True)
            threshold = torch.maximum(threshold, smallest_kept)
    if min_p is not None:
        threshold = torch.maximum(threshold, min_p.to(scaled.dtype).log()[:, None])
    return threshold
