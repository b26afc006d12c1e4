"""Temperature and the truncations of a distribution. Dimensions: B sequences, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

_UNITS = 2**52  # of probability mass in 1


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return ``(logits - max) / temperature``, ``[B, V]``: at most 0, and 0 at the likeliest token.

    The maximum goes first, so that no positive temperature overflows it. Rows of temperature 0
    are divided by 1.
    """
    divisor = torch.where(temperature > 0, temperature, 1).to(logits.dtype)
    return (logits - logits.amax(-1, keepdim=True)) / divisor[:, None]


def truncation_threshold(
    scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Return the least value of ``scaled`` that each row keeps, ``[B, 1]``, at most 0.

    A token is kept if its value reaches the threshold, so that equal tokens are kept or dropped
    together. In this order:

    - top-k keeps the k likeliest; 0 keeps all.
    - top-p keeps, of those and renormalised to them, each token whose likelier ones hold less
      than p together; 1 keeps all.
    - min-p keeps what is at least p times as likely as the likeliest token; 0 keeps all.

    Each keeps the likeliest token. None keeps all in every row, and the vocabulary is sorted only
    for top-k and top-p.

    Args:
        scaled: ``[B, V]`` of ``temper``, float32 or wider.
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
            # Counted in integers: a sum of floats depends on the order of its terms, which not
            # every device keeps.
            units = (mass * _UNITS).to(torch.int64)
            likelier = (units.cumsum(-1) - units).to(scaled.dtype) / _UNITS
            kept = (likelier < limit) | (limit >= 1)
            least = torch.where(kept, ordered, 0).amin(-1, keepdim=True)
            threshold = torch.maximum(threshold, least)
    if min_p is not None:
        threshold = torch.maximum(threshold, min_p.to(scaled.dtype).log()[:, None])
    return threshold
