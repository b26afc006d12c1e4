"""The modules of a model that are counted: linears, layer norms and root-mean-square norms."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

KINDS = ("Linear", "LayerNorm", "RMSNorm")
# A norm divides by its rows' length to the precision of float32 at least; what else a module may do
# to its rows shows in the first digits.
RESOLUTION = 1e-4


def counted(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield kind, name and module of every module that is counted, each once.

    A ``Conv1D`` of transformers is a linear whose weight is transposed.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            yield "Linear", name, module
        elif isinstance(module, nn.LayerNorm):
            yield "LayerNorm", name, module
        elif is_rms_norm(module):
            yield "RMSNorm", name, module


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether a leaf divides rows by their root mean square, as its numbers say."""
    own = list(module.parameters())
    if next(module.children(), None) is not None or len(own) > 1:
        return False
    if own and (own[0].dim() != 1 or not own[0].is_floating_point()):
        return False
    if not own and type(module).__module__.startswith("torch."):
        return False  # activations, dropout and the like: none of torch's own scales by the length
    width = own[0].shape[0] if own else 64
    x = 100 * torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = own[0].detach().double() if own else torch.zeros(width, dtype=torch.float64)
    try:
        with torch.no_grad():
            y = copy.deepcopy(module).double()(x)
    except Exception:  # noqa: BLE001  it wants other arguments
        return False
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return False
    unit = x / x.square().mean(-1, keepdim=True).sqrt()
    return any(
        torch.allclose(y.double(), unit * scale, rtol=RESOLUTION, atol=RESOLUTION)
        for scale in ((weight, 1 + weight) if own else (1 + weight,))
    )
