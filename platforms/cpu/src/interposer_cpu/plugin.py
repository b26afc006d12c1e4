"""The records of the CPU platform. Neither this module nor what it imports needs torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import AttentionEntry, Kernel, PlatformEntry, Record
from interposer.requires import Requires

_FLOATS = Requires(dtypes=("float32", "bfloat16", "float16"))
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})


def _kernel(op: str, technique: str, module: str, requires: Requires, **options: str) -> Kernel:
    name = f"{op}_{technique}"
    return Kernel(op, name, f"interposer_cpu.{module}", "cpu", requires, **options)


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform, its kernels and its attention backend."""
    packed = Requires(_AVX512, frozenset({"x86_64"}), ("float32",))
    packed_bfloat16 = Requires(
        _AVX512 | {"avx512_bf16"}, frozenset({"x86_64"}), ("bfloat16",)
    )
    return [
        PlatformEntry("cpu", "interposer_cpu.platform:CPUPlatform", score=0.0),
        AttentionEntry("sdpa", "interposer_cpu.attention:SdpaBackend", "cpu", score=10.0),
        _kernel("rms_norm", "vector_norm", "norms:rms_norm", _FLOATS),
        _kernel("fused_add_rms_norm", "vector_norm", "norms:fused_add_rms_norm", _FLOATS),
        _kernel("silu_and_mul", "native", "activations:silu_and_mul", _FLOATS),
        _kernel("gelu_and_mul", "native", "activations:gelu_and_mul", _FLOATS),
        _kernel("rotary_embedding", "addcmul", "rotary:rotary_embedding", _FLOATS),
        _kernel("reshape_and_cache", "index_copy", "kv_cache:reshape_and_cache", _FLOATS),
        _kernel("embedding", "index_select", "linear:embedding", _FLOATS),
        _kernel(
            "linear",
            "packed",
            "linear:linear_packed",
            packed,
            predicate="interposer_cpu.linear:judge_packed",
            prepare="interposer_cpu.linear:pack",
        ),
        _kernel(
            "linear",
            "packed_bfloat16",
            "linear:linear_packed",
            packed_bfloat16,
            predicate="interposer_cpu.linear:judge_packed",
            prepare="interposer_cpu.linear:pack",
        ),
        _kernel(
            "linear",
            "packed_by_rows",
            "linear:linear_packed_by_rows",
            packed,
            predicate="interposer_cpu.linear:judge_packed_by_rows",
            prepare="interposer_cpu.linear:pack_beside",
        ),
    ]
