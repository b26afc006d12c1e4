"""The records of the Triton kernels and of the platform that interprets them; light."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from interposer.records import Kernel, PlatformEntry, Record
from interposer.requires import Dim, Requires

__all__ = ["triton_records"]

_FLOATS = ("float32", "bfloat16", "float16")
# What is copied as bits.
_COPIED = (
    *_FLOATS,
    *("float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
_FEATURES = frozenset({"triton"})
_JUDGE = "interposer_ops._triton.availability:judge"
_JUDGE_FP8 = "interposer_ops._triton.availability:judge_fp8"
_JUDGE_INTEGERS = "interposer_ops._triton.availability:judge_integers"
_JUDGE_OPERANDS = "interposer_ops._triton.availability:judge_operands"
_JUDGE_SPLIT = "interposer_ops._triton.availability:judge_split"
# By construction: no atomic adds, sums of a row in an order that its width alone decides, no
# synchronisation, and no allocation whose size depends on values.
_PROMISES = frozenset({"batch_invariant", "deterministic", "graph_safe", "opaque"})


class _Row(NamedTuple):
    """One kernel: its op, the module of this package, and what differs from the usual."""

    op: str
    module: str
    dtypes: tuple[str, ...] = _FLOATS
    dims: Mapping[str, Dim] = MappingProxyType({})
    judge: str = _JUDGE
    score: float = 10.0
    promises: frozenset[str] = _PROMISES
    technique: str = "triton"


_ACTIVATIONS = (
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
)

_LOGITS = (
    "apply_penalties",
    "apply_temperature",
    "apply_token_bitmask",
    "apply_logit_bias",
    "suppress_tokens_until",
)

_ROW_COPIES = (
    "embedding",
    "vocab_parallel_embedding",
    "select_rows",
    "pad_rows",
    "unpad_rows",
)

_ROWS = (
    _Row("rms_norm", "norms._norms_triton"),
    _Row("fused_add_rms_norm", "norms._norms_triton"),
    _Row("gemma_rms_norm", "norms._norms_triton"),
    _Row("fused_add_gemma_rms_norm", "norms._norms_triton"),
    _Row("layer_norm", "norms._norms_triton"),
    *(_Row(op, "activations._activations_triton") for op in _ACTIVATIONS),
    _Row("rotary_embedding", "rotary._rotary_triton"),
    _Row("rotary_embedding_interleaved", "rotary._rotary_triton"),
    _Row("multimodal_rotary_embedding", "rotary._rotary_triton"),
    _Row("reshape_and_cache", "caches._kv_cache_triton"),
    _Row("reshape_and_cache_fp8", "caches._kv_cache_triton"),
    _Row("gather_cache", "caches._kv_cache_triton", _COPIED),
    _Row("gather_cache_fp8", "caches._kv_cache_triton", judge=_JUDGE_FP8),
    _Row("copy_pages", "caches._kv_cache_triton", _COPIED),
    _Row("write_latent_cache", "caches._mla_cache_triton"),
    _Row("latent_attention_decode", "latent_attention._latent_attention_triton", judge=_JUDGE_FP8),
    _Row("sparse_latent_attention", "latent_attention._latent_attention_triton", judge=_JUDGE_FP8),
    _Row("indexer_scores", "attention._sparse_attention_triton", judge=_JUDGE_FP8),
    # The only query of a sequence takes another way than one of several.
    _Row(
        "paged_attention",
        "attention._paged_attention_triton",
        judge=_JUDGE_FP8,
        promises=_PROMISES - {"batch_invariant"},
    ),
    _Row("ragged_attention", "attention._ragged_attention_triton"),
    _Row("ragged_attention_with_lse", "attention._ragged_attention_triton"),
    _Row("merge_attention_states", "attention._attention_states_triton"),
    # Tiles, and with them the order of sums, depend on the number of tokens.
    _Row(
        "w4a16_linear",
        "quantized_linear._weight_only_linear_triton",
        promises=_PROMISES - {"batch_invariant"},
    ),
    _Row(
        "w8a16_linear",
        "quantized_linear._weight_only_linear_triton",
        promises=_PROMISES - {"batch_invariant"},
    ),
    _Row(
        "fp8_linear",
        "quantized_linear._scaled_linear_triton",
        judge=_JUDGE_OPERANDS,
        promises=_PROMISES - {"batch_invariant"},
    ),
    # What multiplies many rows is the same as without them.
    _Row(
        "linear",
        "linear._split_linear_triton",
        dtypes=("bfloat16", "float16"),
        judge=_JUDGE_SPLIT,
        promises=_PROMISES - {"batch_invariant"},
        technique="split",
    ),
    _Row(
        "fp8_linear",
        "linear._split_linear_triton",
        judge=_JUDGE_SPLIT,
        score=10.5,
        promises=_PROMISES - {"batch_invariant"},
        technique="split",
    ),
    _Row(
        "fp8_block_linear",
        "quantized_linear._scaled_linear_triton",
        dims={"block_columns": Dim(multiple_of=32)},
        judge=_JUDGE_OPERANDS,
        promises=_PROMISES - {"batch_invariant"},
    ),
    # A sum of so many products, each below 2^15, is exact in int32.
    _Row(
        "int8_linear",
        "quantized_linear._scaled_linear_triton",
        dims={"in_features": Dim(at_most=2**16)},
        judge=_JUDGE_INTEGERS,
    ),
    # The same of a group, whose products are below 2^12.
    _Row(
        "w4a8_linear",
        "quantized_linear._w4a8_linear_triton",
        dims={"group_size": Dim(at_most=2**19)},
        judge=_JUDGE_INTEGERS,
    ),
    *(
        _Row(
            op,
            "quantized_linear._microscaled_linear_triton",
            judge=_JUDGE_OPERANDS,
            promises=_PROMISES - {"batch_invariant"},
        )
        for op in ("mxfp4_linear", "mxfp8_linear", "nvfp4_linear")
    ),
    _Row("lora_shrink", "lora._lora_triton"),
    _Row("lora_expand", "lora._lora_triton"),
    *(_Row(op, "embedding._row_copies_triton") for op in _ROW_COPIES),
    _Row("logits_softcap", "sampling._softcap_triton"),
    *(
        _Row(op, "experts._routing_triton")
        for op in ("topk_softmax", "topk_sigmoid", "grouped_topk")
    ),
    *(_Row(op, "sampling._logits_triton") for op in _LOGITS),
    *(_Row(op, "sampling._truncation_triton") for op in ("mask_min_p", "mask_top_k_top_p")),
    *(_Row(op, "sampling._sampling_triton") for op in ("gumbel_argmax", "sample_tokens")),
    # The likeliest are found one after the other, and all of a row's parts fit one program.
    _Row("token_logprobs", "sampling._logprobs_triton", dims={"num_top": Dim(at_most=64)}),
    *(_Row(op, "sampling._speculative_triton") for op in ("greedy_verify", "rejection_sample")),
    _Row("fused_experts", "experts._experts_triton"),
    _Row("fused_experts_fp8", "experts._experts_triton"),
    _Row("fused_experts_w4a16", "experts._experts_triton", dims={"group_size": Dim(multiple_of=2)}),
    _Row("fused_experts_mxfp4", "experts._experts_triton"),
    _Row("moe_align_blocks", "experts._expert_permutation_triton", ("int32", "int64")),
    _Row("moe_permute", "experts._expert_permutation_triton"),
    _Row("moe_unpermute", "experts._expert_permutation_triton"),
    _Row("moe_sum", "experts._expert_permutation_triton"),
    _Row("quantize_fp8_static", "quantizers._tensor_quantizers_triton"),
    # The scale is that of all rows.
    _Row(
        "quantize_fp8_dynamic",
        "quantizers._tensor_quantizers_triton",
        promises=_PROMISES - {"batch_invariant"},
    ),
    _Row("quantize_int8_static", "quantizers._tensor_quantizers_triton"),
    _Row("quantize_fp8_per_token", "quantizers._quantizers_triton"),
    _Row("quantize_fp8_blocks", "quantizers._quantizers_triton"),
    _Row("quantize_int8_per_token", "quantizers._quantizers_triton"),
    _Row("quantize_int8_per_token_asymmetric", "quantizers._quantizers_triton"),
    _Row("rms_norm_quantize_fp8", "norms._quantized_norms_triton"),
    _Row("qk_norm", "norms._head_norms_triton"),
    _Row("l2_norm", "norms._head_norms_triton"),
    _Row("gated_rms_norm", "norms._head_norms_triton"),
    *(
        _Row(f"quantize_{name}", "quantizers._microscaling_triton")
        for name in ("mxfp8", "mxfp4", "nvfp4")
    ),
    *(_Row(f"dequantize_{name}", "quantizers._microscaling_triton") for name in ("mxfp4", "nvfp4")),
    _Row("tile_scales", "quantizers._microscaling_triton", ("uint8", "float8_e4m3fn")),
)


def triton_records() -> list[Record]:
    """Return all Triton kernels, and the platform ``interpreter``."""
    kernels = [
        Kernel(
            row.op,
            f"{row.op}_{row.technique}",
            f"interposer_ops.{row.module}:{row.op}_{row.technique}",
            requires=Requires(_FEATURES, dtypes=row.dtypes, dims=row.dims),
            predicate=row.judge,
            score=row.score,
            properties=row.promises,
        )
        for row in _ROWS
    ]
    platform = PlatformEntry(
        "interpreter",
        "interposer_ops._triton.interpreter:InterpreterPlatform",
        score=-10.0,
        explicit=True,
    )
    return [*kernels, platform]
