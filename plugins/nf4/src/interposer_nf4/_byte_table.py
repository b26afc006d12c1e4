"""A kernel that decodes two weights with one look-up of their byte.

The look-up runs in one thread, what follows it in as many as torch has.

Dimensions: T tokens, I input features, O output features, G inputs per block.
"""

from __future__ import annotations

import torch
from torch.nn import functional

# Weights that are decoded before they are multiplied by; 1 MiB of float32 stays in most caches.
_PANEL = 1 << 18


def prepare(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    bias: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """Return the constants with the codebook ``[16]`` replaced by a table ``[256]`` int64.

    An entry holds the two float32 that a byte stands for, in the order of the inputs. As integers
    they are moved and never computed with.
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
    """Return the op ``nf4_linear``, decoded and multiplied a panel of outputs at a time.

    ``codebook`` is the table of ``prepare``.
    """
    out_features, in_features = weight.shape[0], 2 * weight.shape[1]
    inputs = x.float()
    y = x.new_empty(*x.shape[:-1], out_features)
    rows = max(1, _PANEL // in_features)
    for start in range(0, out_features, rows):
        stop = min(start + rows, out_features)
        decoded = codebook.index_select(0, weight[start:stop].flatten().int()).view(torch.float32)
        blocks = decoded.view(stop - start, absmax.shape[1], -1)
        panel = blocks.mul_(absmax[start:stop].unsqueeze(-1)).flatten(1)
        offset = None if bias is None else bias[start:stop].float()
        y[..., start:stop] = functional.linear(inputs, panel, offset)
    return y
