"""The patch for routed experts: an out-of-tree subclass that vLLM builds instead."""

from __future__ import annotations

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._experts import adopt_experts
from interposer_vllm._patch import Patch
from interposer_vllm._replacement import replace_layers

__all__ = ["PATCH"]

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_LAYER = f"{_FUSED_MOE}.routed_experts"
_METHOD = "UnquantizedFusedMoEMethod"
_PLAIN = f"{_FUSED_MOE}.unquantized_fused_moe_method:{_METHOD}"
_INIT = (
    "(self, layer_name, params_dtype, moe_config, quant_config, expert_map_manager, "
    "ckpt_gate_proj_name='gate_proj', ckpt_down_proj_name='down_proj', "
    "ckpt_up_proj_name='up_proj', is_fused_checkpoint_transposed=False, renormalize=True, "
    "use_grouped_topk=False, num_expert_group=None, topk_group=None, "
    "custom_routing_function=None, scoring_func='softmax', routed_scaling_factor=1.0, "
    "swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None, e_score_correction_bias=None, "
    "apply_router_weight_on_input=False)"
)
_MOE_CONFIG = (
    "(num_experts, experts_per_token, hidden_dim, intermediate_size, num_local_experts, "
    "num_logical_experts, activation, device, routing_method, moe_parallel_config, in_dtype, "
    "router_logits_dtype=None, hidden_dim_unpadded=None, "
    "intermediate_size_per_partition_unpadded=None, intermediate_pad=None, moe_backend='auto', "
    "max_num_tokens=256, elastic_ep_max_dp_size=None, has_bias=False, is_lora_enabled=False, "
    "has_hash_routing=False, shared_expert_prefix=None, skip_final_all_reduce=False, "
    "defer_moe_finalize_max_num_tokens=-1, swiglu_limit=None, swiglu_alpha=None, "
    "swiglu_beta=None, activation_situ_beta=None, activation_situ_linear_beta=None, "
    "max_capture_size=0, intermediate_size_per_partition=-1, tp_shard_with_padding=False, "
    "rocm_aiter_fmoe_enabled=False, aiter_fmoe_shared_expert_enabled=False, "
    "use_mxfp4_w4a4_dsv4=False)"
)
_PARALLEL_CONFIG = (
    "(tp_size, pcp_size, dp_size, ep_size, tp_rank, pcp_rank, dp_rank, ep_rank, sp_size, use_ep, "
    "all2all_backend, enable_eplb)"
)
_FORWARD = "(self, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None)"
_APPLY = "(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)"


def _apply() -> Verdict:
    from vllm.model_executor.custom_op import op_registry_oot

    if _METHOD in op_registry_oot:
        return Verdict.refuse(f"another plugin has replaced {_METHOD}")
    return replace_layers(_LAYER, {"RoutedExperts": adopt_experts})


PATCH = Patch(
    name="experts",
    members=(
        HostMember(
            "vllm.model_executor.custom_op:PluggableLayer.register_oot",
            "(_decorated_layer_cls=None, name=None)",
        ),
        HostMember(f"{_LAYER}:RoutedExperts.__init__", _INIT),
        HostMember(f"{_LAYER}:RoutedExperts.forward_modular", _FORWARD),
        HostMember(f"{_PLAIN}.apply", _APPLY),
        HostMember(f"{_PLAIN}.process_weights_after_loading", "(self, layer)"),
        HostMember(f"{_PLAIN}.get_fused_moe_quant_config", "(self, layer)"),
        HostMember(f"{_FUSED_MOE}.config:FusedMoEConfig", _MOE_CONFIG),
        HostMember(f"{_FUSED_MOE}.config:FusedMoEParallelConfig", _PARALLEL_CONFIG),
        HostMember("vllm.config:get_current_vllm_config", "()"),
    ),
    apply=_apply,
    scope="Routed experts",
)
