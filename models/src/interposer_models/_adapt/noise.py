"""The noise of a decoder: how far one rounding moves its logits, and how far many may.

Dimensions: T tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from interposer_models._adapt.agreement import signs

# Results that a block rounds: projections, norms, products, the attention and both sums.
ROUNDINGS = 10


def bound_of(model: nn.Module, expected: Tensor, noisy: Tensor, num_layers: int) -> float:
    """Return how far results may be from ``expected``, as a fraction of its norm.

    Each block has a few roundings, which are independent, in either run. The bound is twice their
    root of the sum of squares.

    Args:
        noisy: what ``rounded`` returned.
        num_layers: how many attend, if more than the model has blocks.
    """
    one = max(distance(noisy, expected), torch.finfo(expected.dtype).eps / 2)
    return 2 * math.sqrt(2 * ROUNDINGS * max(num_layers, num_blocks(model))) * one


def distance(found: Tensor, expected: Tensor) -> float:
    """Return how far apart two results are, as a fraction of the expected one's norm."""
    wide = expected.double()
    norm = max(float(wide.norm()), torch.finfo(torch.float64).tiny)
    return float((found.double() - wide).norm()) / norm


def alone(model: nn.Module, prompt: list[int], device: str) -> Tensor:
    """Return ``[T, V]`` of the model as it is."""
    ids = torch.tensor([prompt], device=device)
    out = model(input_ids=ids, use_cache=False, return_dict=True)
    return logits_of(out)


def logits_of(out: Any) -> Tensor:
    """Return ``[T, V]`` of one sequence; hidden states where the model has no head."""
    logits: Tensor = out.last_hidden_state if getattr(out, "logits", None) is None else out.logits
    return logits[0]


def rounded(model: nn.Module, prompt: list[int], device: str) -> Tensor:
    """Return ``[T, V]`` where every number of the embeddings is rounded once more."""
    holder: Any = model

    def perturb(_: nn.Module, __: object, out: Tensor) -> Tensor:
        return rounded_once(out)

    hook = holder.get_input_embeddings().register_forward_hook(perturb)
    try:
        return alone(model, prompt, device)
    finally:
        hook.remove()


def rounded_once(x: Tensor) -> Tensor:
    """Return ``x`` with half of its numbers moved to the next one, as rounding may."""
    change = signs(tuple(x.shape), x.dtype, x.device) * (torch.finfo(x.dtype).eps / 2)
    # A step to the next number, where half of one would be rounded away.
    return torch.where(change > 0, x * (1 + 2 * change), x)


def num_blocks(model: nn.Module) -> int:
    """Return the length of the longest list of modules, of which a decoder's blocks are one."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return max((len(each) for each in lists), default=1)
