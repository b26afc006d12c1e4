"""The selection request for an MoE layer of vLLM, or the reason for refusing the layer."""

from __future__ import annotations

from typing import Any

from interposer import ExpertsSpec
from interposer.errors import ConfigError

__all__ = ["spec_of"]

# Activations of interposer by vLLM's names. Others have no equivalent, or belong to models whose
# loaders order the outputs differently.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu"}


def spec_of(layer: Any) -> ExpertsSpec:
    """Describe a ``RoutedExperts`` of vLLM, on this worker, as a request for experts.

    Raises: ConfigError: no op computes the experts as vLLM does, or vLLM also moves, pads or adapts
        the weights.
    """
    moe = layer.moe_config
    reason = _refusal(layer, moe)
    if reason is not None:
        raise ConfigError(reason)
    return ExpertsSpec(
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition,
        num_experts=moe.num_local_experts,
        top_k=moe.experts_per_token,
        activation=_ACTIVATIONS[moe.activation.value],
        biased=moe.has_bias,
        projections=(
            layer.ckpt_gate_proj_name,
            layer.ckpt_up_proj_name,
            layer.ckpt_down_proj_name,
        ),
    )


def _refusal(layer: Any, moe: Any) -> str | None:
    parallel = moe.moe_parallel_config
    activation = moe.activation.value
    padded = moe.intermediate_size_per_partition != moe.intermediate_size_per_partition_unpadded
    if activation not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        return f"its activation is {activation!r}, supported are {supported}"
    if layer.swiglu_limit is not None:
        return f"its gates are clamped at {layer.swiglu_limit}"
    if layer.apply_router_weight_on_input:
        return "it applies router weights to the inputs of experts, not to their outputs"
    if padded or moe.hidden_dim != moe.hidden_dim_unpadded:
        return "vLLM pads its weights for a kernel of its own"
    if parallel.enable_eplb:
        return "vLLM moves its experts between workers while it runs"
    if moe.is_lora_enabled:
        return "adapters of vLLM read its weights"
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel:
        return "its tokens are spread over several workers, and only vLLM's kernel exchanges them"
    if getattr(layer.quant_config, "desc_act", False):
        return "vLLM drops the order of its inputs"
    return None
