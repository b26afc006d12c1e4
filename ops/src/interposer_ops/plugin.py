"""The plugin record of the standard ops, layers and the attention backend built from ops."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import AttentionEntry, Kernel, LayerEntry, OpEntry, Record
from interposer.requires import Requires
from interposer_ops._triton.records import triton_records

INTERPOSER_API = ">=1.0,<2"

_OPS = {
    "norms": (
        "rms_norm",
        "fused_add_rms_norm",
        "gemma_rms_norm",
        "fused_add_gemma_rms_norm",
        "layer_norm",
        "qk_norm",
        "l2_norm",
        "gated_rms_norm",
        "rms_norm_quantize_fp8",
    ),
    "activations": (
        "gelu",
        "quick_gelu",
        "relu2",
        "silu_and_mul",
        "gelu_and_mul",
        "mul_and_silu",
        "relu2_and_mul",
        "fatrelu_and_mul",
        "swiglu_oai_and_mul",
        "swiglu_clamped_and_mul",
    ),
    "rotary": (
        "rotary_embedding",
        "rotary_embedding_interleaved",
        "rotary_tables",
        "multimodal_rotary_embedding",
    ),
    "linear": (
        "linear",
        "grouped_linear",
        "batched_linear",
        "embedding",
        "vocab_parallel_embedding",
    ),
    "embedding": (
        "w4a16_embedding",
        "w8a16_embedding",
        "select_rows",
        "pad_rows",
        "unpad_rows",
    ),
    "lora": (
        "lora_shrink",
        "lora_expand",
    ),
    "quantized_linear": (
        "fp8_linear",
        "fp8_block_linear",
        "int8_linear",
        "w4a8_linear",
        "w4a16_linear",
        "w8a16_linear",
        "mxfp4_linear",
        "mxfp8_linear",
        "nvfp4_linear",
        "tile_scales",
    ),
    "quantizers": (
        "quantize_fp8_static",
        "quantize_fp8_dynamic",
        "quantize_fp8_per_token",
        "quantize_fp8_blocks",
        "quantize_int8_static",
        "quantize_int8_per_token",
        "quantize_int8_per_token_asymmetric",
        "quantize_weight_int8",
        "quantize_weight_int4",
        "quantize_weight_int4_asymmetric",
        "quantize_mxfp8",
        "quantize_mxfp4",
        "dequantize_mxfp4",
        "quantize_nvfp4",
        "dequantize_nvfp4",
        "hadamard_transform",
    ),
    "caches": (
        "reshape_and_cache",
        "gather_cache",
        "copy_pages",
        "slots_of_positions",
        "reshape_and_cache_fp8",
        "gather_cache_fp8",
        "reshape_and_cache_int8",
        "gather_cache_int8",
        "write_latent_cache",
    ),
    "sampling": (
        "logits_softcap",
        "apply_penalties",
        "sample_tokens",
        "gumbel_argmax",
        "apply_logit_bias",
        "apply_token_bitmask",
        "suppress_tokens_until",
        "apply_temperature",
        "mask_top_k_top_p",
        "mask_min_p",
        "token_logprobs",
        "greedy_verify",
        "rejection_sample",
    ),
    "attention": (
        "paged_attention",
        "ragged_attention",
        "ragged_attention_with_lse",
        "merge_attention_states",
        "indexer_scores",
        "indexer_topk",
    ),
    "latent_attention": (
        "latent_attention_decode",
        "sparse_latent_attention",
    ),
    "experts": (
        "topk_softmax",
        "topk_sigmoid",
        "grouped_topk",
        "moe_align_blocks",
        "moe_permute",
        "moe_unpermute",
        "moe_sum",
        "fused_experts",
        "fused_experts_fp8",
        "fused_experts_w4a16",
        "fused_experts_mxfp4",
    ),
}
_PLAIN = frozenset({"deterministic", "graph_safe", "traceable"})
# They copy, compare, add, multiply and divide, which rounds the same way wherever an element
# stands. A sum over a row may be split differently for more rows, and an exponential computed
# differently at the end of a chunk of memory.
_BATCH_INVARIANT = frozenset(
    {
        "rotary_embedding",
        "rotary_embedding_interleaved",
        "embedding",
        "vocab_parallel_embedding",
        "w4a16_embedding",
        "w8a16_embedding",
        "reshape_and_cache",
        "reshape_and_cache_fp8",
        "reshape_and_cache_int8",
        "write_latent_cache",
        "apply_penalties",
        "quantize_fp8_per_token",
        "quantize_fp8_blocks",
        "quantize_int8_per_token",
        "quantize_int8_per_token_asymmetric",
        "quantize_mxfp8",
        "quantize_mxfp4",
        "quantize_nvfp4",
        "relu2",
        "relu2_and_mul",
        "fatrelu_and_mul",
    }
)
_LAYERS = {
    "rms_norm": "norm:RMSNorm",
    "linear": "linear:Linear",
    "merged_linear": "linear:MergedLinear",
    "embedding": "embedding:Embedding",
    "lm_head": "embedding:LMHead",
    "rotary_embedding": "rotary:RotaryEmbedding",
    "activation": "activation:GatedActivation",
    "gated_mlp": "mlp:GatedMLP",
    "router": "experts:Router",
    "experts": "experts:Experts",
    "attention": "attention:Attention",
    "self_attention": "self_attention:SelfAttention",
    "decoder_block": "decoder_block:DecoderBlock",
    "sampler": "sampler:Sampler",
}
# Their references multiply in floats what was quantized to be multiplied as it is.
_EMULATED = frozenset(
    {
        "fp8_linear",
        "fp8_block_linear",
        "int8_linear",
        "w4a8_linear",
        "w4a16_linear",
        "w8a16_linear",
        "mxfp4_linear",
        "mxfp8_linear",
        "nvfp4_linear",
        "fused_experts_fp8",
        "fused_experts_w4a16",
        "fused_experts_mxfp4",
    }
)
_EMULATION = "dequantizes, then multiplies floats"
# Where the cases of a layer are that has a module of its own for them.
_CASES = {
    "attention": "_attention_cases",
    "decoder_block": "_decoder_block_cases",
    "sampler": "_sampler_cases",
}


@hookimpl
def interposer_records() -> list[Record]:
    """Return all ops, the standard layers and the ``paged`` attention backend."""
    ops = [
        OpEntry(
            name,
            f"interposer_ops.{module}:{name}",
            _PLAIN | {"batch_invariant"} if name in _BATCH_INVARIANT else _PLAIN,
            _EMULATION if name in _EMULATED else "",
        )
        for module, names in _OPS.items()
        for name in names
    ]
    layers = [
        LayerEntry(
            layer_id,
            "standard",
            f"interposer_ops.layers.{target}",
            score=0.0,
            cases=f"interposer_ops.layers.{_CASES.get(layer_id, '_cases')}:{layer_id}_layers",
        )
        for layer_id, target in _LAYERS.items()
    ]
    # They wait for numbers of tokens, and hold less than the references.
    in_turn = [
        Kernel(
            op,
            f"{op}_in_turn",
            f"interposer_ops.experts._sequential_experts:{op}_in_turn",
            requires=Requires(dtypes=("float32", "bfloat16", "float16")),
            score=5.0,
            properties=frozenset({"deterministic", "opaque"}),
        )
        for op in ("fused_experts", "fused_experts_mxfp4")
    ]
    scaled_mm = Kernel(
        "fp8_linear",
        "fp8_linear_scaled_mm",
        "interposer_ops.quantized_linear._scaled_mm:fp8_linear_scaled_mm",
        requires=Requires(dtypes=("float32", "bfloat16", "float16")),
        predicate="interposer_ops.quantized_linear._scaled_mm:judge",
        score=11.0,
        properties=frozenset({"deterministic", "graph_safe", "traceable"}),
    )
    # It adds nothing to the kernels that it binds, of which a policy requires the same.
    paged = AttentionEntry(
        "paged", "interposer_ops.layers.attention:PagedBackend", score=0.0, properties=_PLAIN
    )
    return [*ops, *layers, *in_turn, scaled_mm, paged, *triton_records()]
