"""Kernel that decodes two 4-bit weights with one table lookup per byte.

The lookup runs in one thread, the matmul in all threads of torch.

Dimensions: T tokens, I input features, O output features, G inputs per block.
"""

from __future__ import annotations

import torch
from torch.nn import functional

# Weights that are decoded at a time; 1 MiB of float32 stays in most caches.
_PANEL = 1 << 18


def prepare(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    bias: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """Return the constants with the codebook ``[16]`` replaced by a table ``[256]`` int64.

    An entry holds the two float32 values of a byte in input order. The int64 type only moves the
    bits and takes part in no arithmetic.
    """
    byte = torch.arange(256, device=codebook.device)
    pairs = torch.stack((codebook[byte >> 4], codebook[byte & 15]), -1)
    table = pairs.float().contiguous().view(torch.int64).flatten()
    return {"weight": weight, "absmax": absmax, "codebook": table, "bias": bias}


def nf4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the op ``nf4_linear``, one panel of outputs after the other.

    ``codebook`` is the table of ``prepare``.
    """
    out_features, in_features = weight.shape[0], 2 * weight.shape[1]
    inputs = x.float()
    y = x.new_empty(*x.shape[:-1], out_features)
    rows = max(1, _PANEL // in_features)
    for start in range(0, out_features, rows):
        stop = min(start + rows, out_features)
        # One int64 entry is two float32 weights.
        decoded = codebook.index_select(0, weight[start:stop].flatten().int()).view(torch.float32)
        # In place: the panel is not copied.
        blocks = decoded.view(stop - start, absmax.shape[1], -1)
        panel = blocks.mul_(absmax[start:stop].unsqueeze(-1)).flatten(1)
        offset = None if bias is None else bias[start:stop].float()
        y[..., start:stop] = functional.linear(inputs, panel, offset)
    return y
