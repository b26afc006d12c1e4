"""Experts of a mixture by AITER, with weights in the order in which its matrix units read them.

Argument mapping is tested with functions that compute on the processor; on a GPU it was not run.

Dimensions: T tokens, H hidden size, E experts, I intermediate size, K chosen experts.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer_rocm._aiter.library import FUSED_MOE, SHUFFLE_WEIGHT, function

_TILE = (16, 16)


def prepare(
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """Return the weights in tiles of 16 by 16; once, after they were loaded.

    AITER marks what it has shuffled by an attribute of the tensor itself.
    """
    return {
        "gate_up": shuffled(gate_up),
        "gate_up_bias": gate_up_bias,
        "down": shuffled(down),
        "down_bias": down_bias,
    }


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Compute ``fused_experts`` for the gates that the record names, without biases."""
    return mixture(x, gate_up, down, weights, expert_ids)


def shuffled(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` in the order in which AITER reads it, marked as such."""
    result: torch.Tensor = function(SHUFFLE_WEIGHT)(weight, layout=_TILE)
    return result


def mixture(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    **quantized: Any,
) -> torch.Tensor:
    """Return AITER's mixture of shuffled experts, gated by silu.

    Args:
        quantized: ``quant_type`` and scales, where weights are quantized.
    """
    if not x.shape[0]:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    # AITER knows no -1: such a slot takes another expert of its token once more, with the weight
    # zero, so that no weight is read which nobody chose. A token of none is cleared afterwards.
    held = expert_ids >= 0
    ids = torch.where(held, expert_ids, expert_ids.amax(-1, keepdim=True).clamp(min=0))
    activations: Any = function("aiter:ActivationType")
    if not quantized:
        kinds: Any = function("aiter:QuantType")
        quantized = {"quant_type": kinds.No}
    out: torch.Tensor = function(FUSED_MOE)(
        x.contiguous(),
        gate_up,
        down,
        weights.masked_fill(~held, 0).contiguous(),
        ids.to(torch.int32).contiguous(),
        activation=activations.Silu,
        **quantized,
    )
    return out.masked_fill_(~held.any(-1, keepdim=True), 0)
