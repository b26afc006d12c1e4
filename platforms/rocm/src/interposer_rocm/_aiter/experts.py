"""The op ``fused_experts`` (MoE) by AITER, with weights shuffled for the matrix units.

Argument mapping is tested with functions that compute on the CPU; no GPU has run this module.

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
    """Shuffle the weights into tiles of 16 by 16, once after loading.

    AITER marks a shuffled weight by an attribute of the tensor object, so the object must be kept.
    """
    return {
        "gate_up": shuffle_weight(gate_up),
        "gate_up_bias": gate_up_bias,
        "down": shuffle_weight(down),
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
    """Compute the op ``fused_experts`` gated by silu, without biases, as the record requires."""
    return run_fused_moe(x, gate_up, down, weights, expert_ids)


def shuffle_weight(weight: torch.Tensor) -> torch.Tensor:
    """Shuffle ``weight`` into AITER's tile order; AITER marks the result as shuffled."""
    result: torch.Tensor = function(SHUFFLE_WEIGHT)(weight, layout=_TILE)
    return result


def run_fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    **quantized: Any,
) -> torch.Tensor:
    """Call AITER's fused MoE, gated by silu, on shuffled weights.

    Args:
        quantized: for quantized weights, ``quant_type`` and the scales.
    """
    if not x.shape[0]:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    # AITER does not take -1 for an absent expert. Such a slot repeats another expert of its token
    # with routing weight zero, so no other expert's weights are read. A token without any expert is
    # zeroed at the end.
    is_valid = expert_ids >= 0
    ids = torch.where(is_valid, expert_ids, expert_ids.amax(-1, keepdim=True).clamp(min=0))
    activations: Any = function("aiter:ActivationType")
    if not quantized:
        quant_types: Any = function("aiter:QuantType")
        quantized = {"quant_type": quant_types.No}
    out: torch.Tensor = function(FUSED_MOE)(
        x.contiguous(),
        gate_up,
        down,
        weights.masked_fill(~is_valid, 0).contiguous(),
        ids.to(torch.int32).contiguous(),
        activation=activations.Silu,
        **quantized,
    )
    return out.masked_fill_(~is_valid.any(-1, keepdim=True), 0)
