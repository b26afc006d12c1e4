"""Records of the CPU platform: kernels, attention backends, layers, collectives and devices.

The module must not import torch: listing records must stay fast.
"""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import (
    AttentionEntry,
    CommunicatorEntry,
    DeviceEntry,
    Kernel,
    LayerEntry,
    PlatformEntry,
    Record,
)
from interposer.requires import Dim, Requires

INTERPOSER_API = ">=1.0,<2"

_WIDE = ("float32", "bfloat16")
_FLOATS = (*_WIDE, "float16")
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_X86 = frozenset({"x86_64"})
_DETERMINISTIC = frozenset({"deterministic", "traceable"})
_INVARIANT = _DETERMINISTIC | {"batch_invariant"}
# Kernels with the same form share one packed copy: a matmul and the lookup in its tied weight.
_FORM = "packed for vectors of sixteen outputs"
_COMPACT_FORM = f"{_FORM}, in 12 bits"
# Faster for up to 8 rows, slower for more, so that a user has to ask for it.
_COMPACT_SCORE = 19.0
# Version of ``interposer_packed`` in native/linear/packed.h and of the contiguous constants.
_LAYOUT = 1

# Processors that are described for planning. ``devices`` has one file for each.
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
    """List the records of the platform, its kernels, backends and described processors."""
    return [
        PlatformEntry("cpu", "interposer_cpu._platform:CPUPlatform", score=0.0),
        *_attention(),
        *_torch_kernels(),
        *_linear(),
        *_experts(),
        *_embedding(),
        *_row_kernels(),
        *_weight_quantizers(),
        *_dense_attention(),
        *_recurrences(),
        *_adapters(),
        *_fused_layers(),
        _shared_memory(),
        *(DeviceEntry(name, "cpu", f"interposer_cpu:devices/{name}.json") for name in _DESCRIBED),
    ]


def _attention() -> list[AttentionEntry]:
    return [
        AttentionEntry(
            "native",
            "interposer_cpu._kernels.attention:NativeBackend",
            "cpu",
            score=20.0,
            properties=frozenset({"deterministic", "batch_invariant"}),
        ),
        AttentionEntry(
            "native_rows",
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
    ]


def _torch_kernels() -> list[Kernel]:
    """List kernels that call CPU-only functions of torch."""

    def packed(technique: str, needs: Requires, function: str, judge: str, prepare: str) -> Kernel:
        module = "interposer_cpu._linear"
        return Kernel(
            "linear",
            f"linear_{technique}",
            f"{module}:{function}",
            "cpu",
            needs,
            f"{module}:{judge}",
            f"{module}:{prepare}",
            properties=frozenset({"deterministic", "opaque"}),
        )

    # Each kernel is restricted to the instructions and dtypes for which it was the fastest one
    # measured.
    float32 = Requires(_AVX512, _X86, ("float32",))
    bfloat16 = Requires(_AVX512 | {"avx512_bf16"}, _X86, ("bfloat16",))
    by_heads = Kernel(
        "batched_linear",
        "batched_linear_torch",
        "interposer_cpu._linear:batched_linear",
        "cpu",
        bfloat16,
        properties=frozenset({"deterministic", "traceable"}),
    )
    return [
        by_heads,
        packed("packed", float32, "linear_packed", "judge_packed", "pack"),
        packed("packed_bfloat16", bfloat16, "linear_packed", "judge_packed", "pack"),
        packed(
            "packed_by_rows",
            float32,
            "linear_packed_by_rows",
            "judge_packed_by_rows",
            "pack_both",
        ),
    ]


def _native(
    op: str,
    module: str,
    judge: str = "",
    prepare: str = "",
    *,
    score: float = 15.0,
    dtypes: tuple[str, ...] = _FLOATS,
    properties: frozenset[str] = _INVARIANT,
    form: str = "",
    restore: str = "",
    technique: str = "native",
) -> Kernel:
    """Build the record of a kernel of the compiled library.

    Args:
        module: module of ``_kernels`` with a function named like the op.
        judge: predicate in ``module``, or ``MODULE:NAME``; default: ``native.judge``.
        prepare: function in ``module`` that packs the constants.
        restore: function in ``module`` that unpacks the constants.
        technique: end of the kernel's name.
    """
    module_path = f"interposer_cpu._kernels.{module}"
    predicate = f"{module_path}:{judge}" if judge else "interposer_cpu.native:judge"
    if ":" in judge:
        predicate = f"interposer_cpu._kernels.{judge}"
    return Kernel(
        op,
        f"{op}_{technique}",
        f"{module_path}:{op}",
        "cpu",
        Requires(dtypes=dtypes),
        predicate,
        f"{module_path}:{prepare}" if prepare else "",
        score=score,
        properties=properties,
        form=form,
        restore=f"{module_path}:{restore}" if restore else "",
        layout=_LAYOUT if prepare else 0,
    )


def _linear() -> list[Kernel]:
    def linear(
        op: str,
        prepare: str,
        judge: str = "",
        dtypes: tuple[str, ...] = _FLOATS,
        restore: str = "",
    ) -> Kernel:
        return _native(
            op, "linear", judge, prepare, score=20.0, dtypes=dtypes, properties=_DETERMINISTIC,
            form=_FORM, restore=restore,
        )  # fmt: skip

    return [
        linear("linear", "pack", dtypes=_WIDE, restore="unpack"),
        _native(
            "linear",
            "linear",
            "judge_compact",
            "pack_compact",
            score=_COMPACT_SCORE,
            dtypes=("bfloat16",),
            properties=_DETERMINISTIC,
            form=_COMPACT_FORM,
            restore="unpack",
            technique="compact",
        ),
        linear("batched_linear", "pack_batched", dtypes=_WIDE),
        linear("w4a16_linear", "pack_w4a16", "judge_groups"),
        linear("w8a16_linear", "pack_w8a16", "judge_groups"),
        linear("mxfp4_linear", "pack_mxfp4"),
        linear("mxfp8_linear", "pack_mxfp8"),
        linear("int8_linear", "pack_int8", "judge_symmetric"),
        linear("w4a8_linear", "pack_w4a8", "judge_codes"),
        linear("fp8_linear", "pack_fp8", "judge_fp8"),
        linear("fp8_block_linear", "pack_fp8_blocks", "judge_fp8_blocks"),
    ]


def _experts() -> list[Kernel]:
    def experts(
        op: str, judge: str = "", dtypes: tuple[str, ...] = _FLOATS, restore: str = ""
    ) -> Kernel:
        return _native(
            op, "experts", judge, f"pack_{op}", score=20.0, dtypes=dtypes,
            properties=_DETERMINISTIC, restore=restore,
        )  # fmt: skip

    return [
        experts("fused_experts", dtypes=_WIDE, restore="unpack_fused_experts"),
        experts("fused_experts_w4a16", "judge_groups"),
        experts("fused_experts_mxfp4"),
        experts("fused_experts_fp8"),
    ]


def _embedding() -> list[Kernel]:
    def lookup(op: str, judge: str, dtypes: tuple[str, ...] = _FLOATS) -> Kernel:
        return _native(op, "embedding", judge, f"pack_{op}", score=20.0, dtypes=dtypes, form=_FORM)

    return [
        lookup("embedding", "judge_tied", _WIDE),
        _native(
            "embedding",
            "embedding",
            "judge_tied_compact",
            "pack_compact_embedding",
            score=_COMPACT_SCORE,
            dtypes=("bfloat16",),
            form=_COMPACT_FORM,
            technique="compact",
        ),
        lookup("w4a16_embedding", "linear:judge_groups"),
        lookup("w8a16_embedding", "linear:judge_groups"),
    ]


def _row_kernels() -> list[Kernel]:
    """List kernels that compute each row independently of the other rows."""
    return [
        _native("rms_norm", "norms", prepare="prepare"),
        _native("fused_add_rms_norm", "norms", prepare="prepare"),
        _native("gemma_rms_norm", "norms", prepare="prepare"),
        _native("fused_add_gemma_rms_norm", "norms", prepare="prepare"),
        _native("layer_norm", "norms", prepare="prepare_affine"),
        _native("qk_norm", "heads", prepare="prepare_qk_norm"),
        _native("rotary_embedding", "heads"),
        _native("rotary_embedding_interleaved", "heads"),
        _native("silu_and_mul", "activations"),
        _native("gelu_and_mul", "activations"),
        _native("gelu", "activations"),
        _native("quick_gelu", "activations"),
        _native("quantize_fp8_blocks", "quantizers", "judge_blocks"),
        _native("quantize_fp8_per_token", "quantizers", "judge_format"),
        _native("quantize_fp8_static", "quantizers", "judge_format"),
        _native("quantize_int8_per_token", "quantizers"),
        _native("quantize_int8_static", "quantizers", "judge_symmetric"),
        _native("quantize_mxfp8", "quantizers"),
        _native("apply_penalties", "sampling"),
        _native("gumbel_argmax", "sampling"),
        _native("sample_tokens", "sampling"),
        _native("grouped_topk", "routing", prepare="prepare"),
        _native("topk_sigmoid", "routing", prepare="prepare"),
        _native("topk_softmax", "routing"),
    ]


def _weight_quantizers() -> list[Kernel]:
    ops = ("quantize_weight_int8", "quantize_weight_int4", "quantize_weight_int4_asymmetric")
    return [_native(op, "weight_quantizers", properties=_DETERMINISTIC) for op in ops]


def _dense_attention() -> list[Kernel]:
    """List the kernels of cacheless (ragged) attention and of latent attention (MLA)."""
    return [
        _native("ragged_attention", "dense"),
        _native("ragged_attention_with_lse", "dense"),
        _native("latent_attention_decode", "dense", "judge_latent"),
    ]


def _recurrences() -> list[Kernel]:
    """List kernels whose state per sequence has a fixed size: convolutions, SSMs, delta rule."""
    ops = ("causal_convolution", "state_space_scan", "gated_delta_rule")
    return [_native(op, "recurrence") for op in ops]


def _adapters() -> list[Kernel]:
    return [
        _native("lora_shrink", "lora", prepare="prepare_shrink"),
        _native("lora_expand", "lora", prepare="prepare_expand"),
    ]


def _fused_layers() -> list[LayerEntry]:
    """List layers that fuse several of their parts into one native call."""
    library = "interposer_cpu.native:judge"
    all_reduce = "interposer_cpu._kernels.block_sums:judge"
    rows = (
        ("gated_mlp", "blocks:NativeGatedMLP", 15.0, library),
        ("self_attention", "blocks:NativeSelfAttention", 15.0, library),
        ("decoder_block", "decoder_block:NativeDecoderBlock", 15.0, all_reduce),
        ("head_linear", "head_linear:NativeHeadLinear", 15.0, library),
        # Below the default score: a plugin that replaces the experts layer brings a dispatcher,
        # and must win without having to state a score.
        ("experts", "expert_layers:NativeExperts", 5.0, library),
    )
    return [
        LayerEntry(
            layer_id,
            "native",
            f"interposer_cpu._kernels.{target}",
            "cpu",
            Requires(dtypes=_FLOATS),
            predicate,
            score=score,
        )
        for layer_id, target, score, predicate in rows
    ]


def _shared_memory() -> CommunicatorEntry:
    """Build the record of the collectives for ranks that share the memory of one host."""
    single = Dim(at_most=1)
    return CommunicatorEntry(
        "shared_memory",
        "interposer_cpu._communicator:SharedMemoryCommunicator",
        (
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "broadcast",
            "all_reduce_add_rms_norm",
        ),
        platform="cpu",
        requires=Requires(dims={"ranks": Dim(at_most=32), "hosts": single, "platforms": single}),
        predicate="interposer_cpu._communicator:judge",
        score=20.0,
        properties=frozenset({"batch_invariant", "deterministic", "opaque"}),
    )
