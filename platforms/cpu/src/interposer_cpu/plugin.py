"""The records of the CPU platform. Neither this module nor what it imports needs torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import (
    AttentionEntry,
    DeviceEntry,
    Kernel,
    LayerEntry,
    PlatformEntry,
    Record,
)
from interposer.requires import Requires

INTERPOSER_API = ">=1.0,<2"

_FLOATS = Requires(dtypes=("float32", "bfloat16", "float16"))
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_X86 = frozenset({"x86_64"})

# Kernels of one function without preparation: op, technique, where the function is.
_PLAIN = (
    ("rms_norm", "vector_norm", "_norms:rms_norm"),
    ("fused_add_rms_norm", "vector_norm", "_norms:fused_add_rms_norm"),
    ("silu_and_mul", "functional", "_activations:silu_and_mul"),
    ("gelu_and_mul", "functional", "_activations:gelu_and_mul"),
    ("rotary_embedding", "addcmul", "_rotary:rotary_embedding"),
    ("reshape_and_cache", "index_copy", "_kv_cache:reshape_and_cache"),
    ("embedding", "index_select", "_linear:embedding"),
)

# Kernels of ``linear``: technique, where it was seen to win, its function, predicate and
# preparation. They differ in the weights that they hold.
_PACKED = (
    ("packed", Requires(_AVX512, _X86, ("float32",)), "linear_packed", "judge_packed", "pack"),
    (
        "packed_bfloat16",
        Requires(_AVX512 | {"avx512_bf16"}, _X86, ("bfloat16",)),
        "linear_packed",
        "judge_packed",
        "pack",
    ),
    (
        "packed_by_rows",
        Requires(_AVX512, _X86, ("float32",)),
        "linear_packed_by_rows",
        "judge_packed_by_rows",
        "pack_beside",
    ),
)

# Kernels of the compiled library: op, dtypes, predicate, preparation.
_WIDE = ("float32", "bfloat16")
# How products and lookups hold a weight: what was packed from the same tensors is held once.
_FORM = "packed for vectors of sixteen outputs"
_NATIVE = (
    ("linear", _WIDE, "native:judge", "pack"),
    ("w4a16_linear", (*_WIDE, "float16"), "_kernels.linear:judge_groups", "pack_w4a16"),
    ("w8a16_linear", (*_WIDE, "float16"), "_kernels.linear:judge_groups", "pack_w8a16"),
    ("mxfp4_linear", (*_WIDE, "float16"), "native:judge", "pack_mxfp4"),
    ("mxfp8_linear", (*_WIDE, "float16"), "native:judge", "pack_mxfp8"),
    ("int8_linear", (*_WIDE, "float16"), "_kernels.linear:judge_symmetric", "pack_int8"),
    ("w4a8_linear", (*_WIDE, "float16"), "_kernels.linear:judge_codes", "pack_w4a8"),
    ("fp8_linear", (*_WIDE, "float16"), "_kernels.linear:judge_fp8", "pack_fp8"),
    (
        "fp8_block_linear",
        (*_WIDE, "float16"),
        "_kernels.linear:judge_fp8_blocks",
        "pack_fp8_blocks",
    ),
)

# Kernels of the compiled library for mixtures of experts: op, dtypes, predicate.
_EXPERTS = (
    ("fused_experts", _WIDE, "native:judge"),
    ("fused_experts_w4a16", (*_WIDE, "float16"), "_kernels.experts:judge_groups"),
    ("fused_experts_mxfp4", (*_WIDE, "float16"), "native:judge"),
    ("fused_experts_fp8", (*_WIDE, "float16"), "native:judge"),
)

# Kernels of the compiled library that read rows of what products read: op, dtypes, predicate,
# preparation.
_TABLES = (
    ("embedding", _WIDE, "_kernels.tables:judge_tied", "pack_table"),
    ("w4a16_embedding", (*_WIDE, "float16"), "_kernels.linear:judge_groups", "pack_w4a16_table"),
    ("w8a16_embedding", (*_WIDE, "float16"), "_kernels.linear:judge_groups", "pack_w8a16_table"),
)

# Kernels of the compiled library that take rows one by one: op, module, preparation.
_ROWS = (
    ("rms_norm", "_kernels.norms", "prepare"),
    ("fused_add_rms_norm", "_kernels.norms", "prepare"),
    ("gemma_rms_norm", "_kernels.norms", "prepare"),
    ("fused_add_gemma_rms_norm", "_kernels.norms", "prepare"),
    ("layer_norm", "_kernels.norms", "prepare_affine"),
    ("qk_norm", "_kernels.heads", "prepare_qk_norm"),
    ("rotary_embedding", "_kernels.heads", ""),
    ("silu_and_mul", "_kernels.activations", ""),
    ("gelu_and_mul", "_kernels.activations", ""),
    ("quantize_fp8_blocks", "_kernels.quantizers", ""),
    ("quantize_fp8_per_token", "_kernels.quantizers", ""),
    ("quantize_fp8_static", "_kernels.quantizers", ""),
    ("quantize_int8_per_token", "_kernels.quantizers", ""),
    ("quantize_int8_static", "_kernels.quantizers", ""),
    ("quantize_mxfp8", "_kernels.quantizers", ""),
    ("apply_penalties", "_kernels.sampling", ""),
    ("gumbel_argmax", "_kernels.sampling", ""),
    ("sample_tokens", "_kernels.sampling", ""),
    ("grouped_topk", "_kernels.routing", "prepare"),
    ("topk_sigmoid", "_kernels.routing", "prepare"),
    ("topk_softmax", "_kernels.routing", ""),
)

# What those of them accept that do not take all of their op.
_JUDGES = {
    "quantize_fp8_blocks": "_kernels.quantizers:judge_blocks",
    "quantize_fp8_per_token": "_kernels.quantizers:judge_format",
    "quantize_fp8_static": "_kernels.quantizers:judge_format",
    "quantize_int8_static": "_kernels.quantizers:judge_symmetric",
}
# Kernels of the compiled library that round weights while they are loaded.
_ROUNDING = ("quantize_weight_int8", "quantize_weight_int4", "quantize_weight_int4_asymmetric")

# Attention of the compiled library to keys in rows: op, predicate.
_DENSE = (
    ("ragged_attention", "native:judge"),
    ("ragged_attention_with_lse", "native:judge"),
    ("latent_attention_decode", "_kernels.dense:judge_latent"),
)

# Layers of the compiled library, which compute several of their parts at once.
_BLOCKS = (
    ("gated_mlp", "_kernels.blocks:NativeGatedMLP"),
    ("self_attention", "_kernels.blocks:NativeSelfAttention"),
    ("decoder_block", "_kernels.decoder_block:NativeDecoderBlock"),
)

# Processors that are described for planning, each in its file of ``devices``.
_DESCRIBED = (
    "ampere-altra",
    "apple-m4",
    "graviton4",
    "icelake-server",
    "sapphire-rapids",
    "z14",
    "z16",
    "zen2",
    "zen5",
)


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform, its kernels, its attention backends and described processors."""
    plain = [
        Kernel(
            op,
            f"{op}_{technique}",
            f"interposer_cpu.{target}",
            "cpu",
            _FLOATS,
            properties=frozenset({"deterministic", "traceable"}),
        )
        for op, technique, target in _PLAIN
    ]
    packed = [
        Kernel(
            "linear",
            f"linear_{technique}",
            f"interposer_cpu._linear:{function}",
            "cpu",
            requires,
            predicate=f"interposer_cpu._linear:{judge}",
            prepare=f"interposer_cpu._linear:{prepare}",
            properties=frozenset({"deterministic", "opaque"}),
        )
        for technique, requires, function, judge, prepare in _PACKED
    ]
    native = [
        Kernel(
            op,
            f"{op}_native",
            f"interposer_cpu._kernels.linear:{op}",
            "cpu",
            Requires(dtypes=dtypes),
            predicate=f"interposer_cpu.{judge}",
            prepare=f"interposer_cpu._kernels.linear:{prepare}",
            score=20.0,
            properties=frozenset({"deterministic", "traceable"}),
            form=_FORM,
        )
        for op, dtypes, judge, prepare in _NATIVE
    ]
    experts = [
        Kernel(
            op,
            f"{op}_native",
            f"interposer_cpu._kernels.experts:{op}",
            "cpu",
            Requires(dtypes=dtypes),
            predicate=f"interposer_cpu.{judge}",
            prepare=f"interposer_cpu._kernels.experts:pack_{op}",
            score=20.0,
            properties=frozenset({"deterministic", "traceable"}),
        )
        for op, dtypes, judge in _EXPERTS
    ]
    tables = [
        Kernel(
            op,
            f"{op}_native",
            f"interposer_cpu._kernels.tables:{op}",
            "cpu",
            Requires(dtypes=dtypes),
            predicate=f"interposer_cpu.{judge}",
            prepare=f"interposer_cpu._kernels.tables:{prepare}",
            score=20.0,
            properties=frozenset({"batch_invariant", "deterministic", "traceable"}),
            form=_FORM,
        )
        for op, dtypes, judge, prepare in _TABLES
    ]
    rows = [
        Kernel(
            op,
            f"{op}_native",
            f"interposer_cpu.{module}:{op}",
            "cpu",
            _FLOATS,
            predicate=f"interposer_cpu.{_JUDGES.get(op, 'native:judge')}",
            prepare=f"interposer_cpu.{module}:{prepare}" if prepare else "",
            score=15.0,
            properties=frozenset({"batch_invariant", "deterministic", "traceable"}),
        )
        for op, module, prepare in _ROWS
    ]
    rounding = [
        Kernel(
            op,
            f"{op}_native",
            f"interposer_cpu._kernels.rounding:{op}",
            "cpu",
            _FLOATS,
            predicate="interposer_cpu.native:judge",
            score=15.0,
            properties=frozenset({"deterministic", "traceable"}),
        )
        for op in _ROUNDING
    ]
    dense = [
        Kernel(
            op,
            f"{op}_native",
            f"interposer_cpu._kernels.dense:{op}",
            "cpu",
            _FLOATS,
            predicate=f"interposer_cpu.{judge}",
            score=15.0,
            properties=frozenset({"batch_invariant", "deterministic", "traceable"}),
        )
        for op, judge in _DENSE
    ]
    blocks = [
        LayerEntry(
            layer_id,
            "native",
            f"interposer_cpu.{target}",
            "cpu",
            _FLOATS,
            predicate="interposer_cpu.native:judge",
            score=15.0,
        )
        for layer_id, target in _BLOCKS
    ]
    return [
        PlatformEntry("cpu", "interposer_cpu._platform:CPUPlatform", score=0.0),
        AttentionEntry(
            "native",
            "interposer_cpu._kernels.attention:NativeBackend",
            "cpu",
            score=20.0,
            properties=frozenset({"deterministic", "batch_invariant"}),
        ),
        AttentionEntry(
            "_kernels.rows",
            "interposer_cpu._kernels.rows_attention:NativeRowsBackend",
            "cpu",
            score=15.0,
            properties=frozenset({"deterministic", "batch_invariant"}),
        ),
        AttentionEntry(
            "sdpa",
            "interposer_cpu._attention:SdpaBackend",
            "cpu",
            properties=frozenset({"deterministic"}),
        ),
        *plain,
        *packed,
        *native,
        *experts,
        *tables,
        *rows,
        *rounding,
        *dense,
        *blocks,
        *(DeviceEntry(name, "cpu", f"interposer_cpu:devices/{name}.json") for name in _DESCRIBED),
    ]
