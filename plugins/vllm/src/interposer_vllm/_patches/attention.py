"""The patch for attention on CPUs: a backend that replaces vLLM's, with vLLM's KV cache."""

from __future__ import annotations

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._patch import Patch

__all__ = ["PATCH"]

_REGISTRY = "vllm.v1.attention.backends.registry"
_CPU = "vllm.v1.attention.backends.cpu_attn"
_INIT = (
    "(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, "
    "kv_cache_dtype, logits_soft_cap=None, attn_type=<AttentionType.DECODER: 'decoder'>, "
    "kv_sharing_target_layer_name=None, sinks=None)"
)
_FORWARD = (
    "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, "
    "output_block_scale=None)"
)
_METADATA = (
    "(num_actual_tokens, max_query_len, query_start_loc, max_seq_len, seq_lens, block_table, "
    "slot_mapping, scheduler_metadata, causal=True, dynamic_causal=None, use_sdpa_prefill=False, "
    "num_decode_tokens=0, sdpa_attn_masks=None, sdpa_start_loc=None, encoder_cache=None)"
)


def _apply() -> Verdict:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    entry = AttentionBackendEnum.CPU_ATTN
    if entry.is_overridden():
        return Verdict.refuse(f"another plugin has replaced it by {entry.get_path()}")
    register_backend(entry, "interposer_vllm._attention.Backend")
    return Verdict.accept()


PATCH = Patch(
    name="attention",
    members=(
        HostMember(f"{_REGISTRY}:register_backend", "(backend, class_path=None, is_mamba=False)"),
        HostMember(f"{_REGISTRY}:AttentionBackendEnum.is_overridden", "(self)"),
        HostMember(f"{_CPU}:CPUAttentionBackendImpl.__init__", _INIT),
        HostMember(f"{_CPU}:CPUAttentionBackendImpl.forward", _FORWARD),
        HostMember(
            f"{_CPU}:CPUAttentionBackendImpl.do_kv_cache_update",
            "(self, layer, key, value, kv_cache, slot_mapping)",
        ),
        HostMember(
            f"{_CPU}:CPUAttentionMetadataBuilder.__init__",
            "(self, kv_cache_spec, layer_names, vllm_config, device)",
        ),
        HostMember(
            f"{_CPU}:CPUAttentionMetadataBuilder.build",
            "(self, common_prefix_len, common_attn_metadata, fast_build=False)",
        ),
        HostMember(f"{_CPU}:CPUAttentionMetadata", _METADATA),
        HostMember(
            "vllm.config:get_layers_from_vllm_config", "(vllm_config, layer_type, layer_names=None)"
        ),
    ),
    apply=_apply,
    scope="Attention layers",
)
