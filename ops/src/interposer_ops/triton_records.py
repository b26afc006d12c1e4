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
_JUDGE = "interposer_ops.triton_availability:judge"
_JUDGE_FP8 = "interposer_ops.triton_availability:judge_fp8"
_JUDGE_INTEGERS = "interposer_ops.triton_availability:judge_integers"
_JUDGE_OPERANDS = "interposer_ops.triton_availability:judge_operands"
_JUDGE_SPLIT = "interposer_ops.triton_availability:judge_split"
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
    _Row("rms_norm", "norms"),
    _Row("fused_add_rms_norm", "norms"),
    _Row("gemma_rms_norm", "norms"),
    _Row("fused_add_gemma_rms_norm", "norms"),
    _Row("layer_norm", "norms"),
    *(_Row(op, "activations") for op in _ACTIVATIONS),
    _Row("rotary_embedding", "rotary"),
    _Row("rotary_embedding_interleaved", "rotary"),
    _Row("multimodal_rotary_embedding", "rotary"),
    _Row("reshape_and_cache", "kv_cache"),
    _Row("reshape_and_cache_fp8", "kv_cache"),
    _Row("gather_cache", "kv_cache", _COPIED),
    _Row("gather_cache_fp8", "kv_cache", judge=_JUDGE_FP8),
    _Row("copy_pages", "kv_cache", _COPIED),
    _Row("write_latent_cache", "mla_cache"),
    _Row("latent_attention_decode", "latent_attention", judge=_JUDGE_FP8),
    _Row("sparse_latent_attention", "latent_attention", judge=_JUDGE_FP8),
    _Row("indexer_scores", "sparse_attention", judge=_JUDGE_FP8),
    # The only query of a sequence takes another way than one of several.
    _Row(
        "paged_attention",
        "paged_attention",
        judge=_JUDGE_FP8,
        promises=_PROMISES - {"batch_invariant"},
    ),
    _Row("ragged_attention", "ragged_attention"),
    _Row("ragged_attention_with_lse", "ragged_attention"),
    _Row("merge_attention_states", "attention_states"),
    # Tiles, and with them the order of sums, depend on the number of tokens.
    _Row("w4a16_linear", "weight_only_linear", promises=_PROMISES - {"batch_invariant"}),
    _Row("w8a16_linear", "weight_only_linear", promises=_PROMISES - {"batch_invariant"}),
    _Row(
        "fp8_linear",
        "scaled_linear",
        judge=_JUDGE_OPERANDS,
        promises=_PROMISES - {"batch_invariant"},
    ),
    # What multiplies many rows is the same as without them.
    _Row(
        "linear",
        "split_linear",
        dtypes=("bfloat16", "float16"),
        judge=_JUDGE_SPLIT,
        promises=_PROMISES - {"batch_invariant"},
        technique="split",
    ),
    _Row(
        "fp8_linear",
        "split_linear",
        judge=_JUDGE_SPLIT,
        score=10.5,
        promises=_PROMISES - {"batch_invariant"},
        technique="split",
    ),
    _Row(
        "fp8_block_linear",
        "scaled_linear",
        dims={"block_columns": Dim(multiple_of=32)},
        judge=_JUDGE_OPERANDS,
        promises=_PROMISES - {"batch_invariant"},
    ),
    # A sum of so many products, each below 2^15, is exact in int32.
    _Row(
        "int8_linear",
        "scaled_linear",
        dims={"in_features": Dim(at_most=2**16)},
        judge=_JUDGE_INTEGERS,
    ),
    # The same of a group, whose products are below 2^12.
    _Row(
        "w4a8_linear",
        "w4a8_linear",
        dims={"group_size": Dim(at_most=2**19)},
        judge=_JUDGE_INTEGERS,
    ),
    *(
        _Row(
            op,
            "microscaled_linear",
            judge=_JUDGE_OPERANDS,
            promises=_PROMISES - {"batch_invariant"},
        )
        for op in ("mxfp4_linear", "mxfp8_linear", "nvfp4_linear")
    ),
    _Row("lora_shrink", "lora"),
    _Row("lora_expand", "lora"),
    *(_Row(op, "row_copies") for op in _ROW_COPIES),
    _Row("logits_softcap", "softcap"),
    *(_Row(op, "routing") for op in ("topk_softmax", "topk_sigmoid", "grouped_topk")),
    *(_Row(op, "logits") for op in _LOGITS),
    *(_Row(op, "truncation") for op in ("mask_min_p", "mask_top_k_top_p")),
    *(_Row(op, "sampling") for op in ("gumbel_argmax", "sample_tokens")),
    # The likeliest are found one after the other, and all of a row's parts fit one program.
    _Row("token_logprobs", "logprobs", dims={"num_top": Dim(at_most=64)}),
    *(_Row(op, "speculative") for op in ("greedy_verify", "rejection_sample")),
    _Row("fused_experts", "experts"),
    _Row("fused_experts_fp8", "experts"),
    _Row("fused_experts_w4a16", "experts", dims={"group_size": Dim(multiple_of=2)}),
    _Row("fused_experts_mxfp4", "experts"),
    _Row("moe_align_blocks", "expert_permutation", ("int32", "int64")),
    _Row("moe_permute", "expert_permutation"),
    _Row("moe_unpermute", "expert_permutation"),
    _Row("moe_sum", "expert_permutation"),
    _Row("quantize_fp8_static", "tensor_quantizers"),
    # The scale is that of all rows.
    _Row("quantize_fp8_dynamic", "tensor_quantizers", promises=_PROMISES - {"batch_invariant"}),
    _Row("quantize_int8_static", "tensor_quantizers"),
    _Row("quantize_fp8_per_token", "quantizers"),
    _Row("quantize_fp8_blocks", "quantizers"),
    _Row("quantize_int8_per_token", "quantizers"),
    _Row("quantize_int8_per_token_asymmetric", "quantizers"),
    _Row("rms_norm_quantize_fp8", "quantized_norms"),
    _Row("qk_norm", "head_norms"),
    _Row("l2_norm", "head_norms"),
    _Row("gated_rms_norm", "head_norms"),
    *(_Row(f"quantize_{name}", "microscaling") for name in ("mxfp8", "mxfp4", "nvfp4")),
    *(_Row(f"dequantize_{name}", "microscaling") for name in ("mxfp4", "nvfp4")),
    _Row("tile_scales", "microscaling", ("uint8", "float8_e4m3fn")),
)


def triton_records() -> list[Record]:
    """Return all Triton kernels, and the platform ``interpreter``."""
    kernels = [
        Kernel(
            row.op,
            f"{row.op}_{row.technique}",
            f"interposer_ops.triton.{row.module}:{row.op}",
            requires=Requires(_FEATURES, dtypes=row.dtypes, dims=row.dims),
            predicate=row.judge,
            score=row.score,
            properties=row.promises,
        )
        for row in _ROWS
    ]
    platform = PlatformEntry(
        "interpreter",
        "interposer_ops.triton.interpreter:InterpreterPlatform",
        score=-10.0,
        explicit=True,
    )
    return [*kernels, platform]
