"""Requests for experts: what vLLM says of a mixture, as experts are described here."""

from __future__ import annotations

from typing import Any

from interposer import ExpertsSpec
from interposer.errors import ConfigError

__all__ = ["spec_of"]

# By vLLM's names. Others compute something else, or order the outputs by the model's own loader.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu"}


def spec_of(layer: Any) -> ExpertsSpec:
    """Return the experts that a ``RoutedExperts`` of vLLM holds on this worker.

    Raises: ConfigError: no op here describes how vLLM computes them, or vLLM does more with their
        weights than to compute.
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
        known = ", ".join(_ACTIVATIONS)
        return f"its activation is {activation!r}, experts taken over have one of {known}"
    if layer.swiglu_limit is not None:
        return f"its gates are clamped at {layer.swiglu_limit}"
    if layer.apply_router_weight_on_input:
        return "it weights what experts read, not what they return"
    if padded or moe.hidden_dim != moe.hidden_dim_unpadded:
        return "vLLM pads its weights for a kernel of its own"
    if parallel.enable_eplb:
        return "vLLM moves its experts between workers while it runs"
    if moe.is_lora_enabled:
        return "adapters of vLLM read its weights"
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel:
        return "its tokens lie on several workers, between which vLLM's own kernel sends them"
    if getattr(layer.quant_config, "desc_act", False):
        return "vLLM drops the order of its inputs"
    return None
