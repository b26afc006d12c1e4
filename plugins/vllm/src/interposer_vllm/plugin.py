"""Records that declare vLLM's ops as kernels, without importing torch or vLLM."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Kernel, Record
from interposer.requires import Dim, Requires

INTERPOSER_API = ">=1.0,<2"

_OPS = "interposer_vllm._ops"
_FLOATS = ("float32", "bfloat16", "float16")
# vLLM registers no fake kernels for these ops, so torch's compiler must not look into them.
_OPAQUE = frozenset({"opaque"})
_DETERMINISTIC = _OPAQUE | {"deterministic"}
# Below kernels that are written for the processor, above torch's own.
_SCORE = 4.0
# The ops' loops on processors handle whole vectors only.
_VECTOR = Dim(multiple_of=16)
_X86 = frozenset({"x86_64"})
# These were never run on a GPU. Proven kernels rank above them, unless the user prefers these or
# the host has measured them.
_NOT_PROVEN: frozenset[str] = frozenset()
_GPUS = ("cuda", "rocm")


@hookimpl
def interposer_records() -> list[Record]:
    """Declare vLLM's ops as kernels: for CPUs, proven against the references, and for GPUs."""
    return [*_cpu_kernels(), *_gpu_kernels()]


def _cpu_kernels() -> list[Record]:
    hidden, inner = {"hidden_size": _VECTOR}, {"intermediate_size": _VECTOR}
    symmetric = {**hidden, "asymmetric": Dim(one_of=(False,))}
    tanh = {**inner, "approximate": Dim(one_of=("tanh",))}
    return [
        _cpu_kernel("rms_norm", "elementwise", "rms_norm", hidden),
        _cpu_kernel("fused_add_rms_norm", "elementwise", "fused_add_rms_norm", hidden),
        _cpu_kernel("silu_and_mul", "elementwise", "silu_and_mul", inner),
        _cpu_kernel("gelu_and_mul", "elementwise", "gelu_and_mul", inner),
        _cpu_kernel("gelu", "elementwise", "gelu", tanh),
        _cpu_kernel("quick_gelu", "elementwise", "quick_gelu", inner),
        _cpu_kernel("rotary_embedding", "rotary", "rotary", {}, ("float32",)),
        _cpu_kernel("rotary_embedding_interleaved", "rotary", "rotary", {}, ("float32",)),
        # With a zero point the op rounds after adding it, so that ties round to another value.
        _cpu_kernel("quantize_int8_static", "quantizers", "static_int8", symmetric),
        _cpu_kernel("quantize_int8_per_token", "quantizers", "dynamic_int8", hidden),
        # In float16 the op aborts the process on processors without float16 matmul instructions.
        Kernel(
            "linear",
            "linear_vllm",
            f"{_OPS}.linear:linear",
            "cpu",
            Requires(
                frozenset({"avx512_bf16"}),
                dtypes=("bfloat16",),
                dims={"in_features": Dim(multiple_of=32), "out_features": Dim(multiple_of=32)},
            ),
            predicate=f"{_OPS}.predicates:check_packed_linear",
            prepare=f"{_OPS}.linear:prepare",
            score=_SCORE,
            properties=_DETERMINISTIC,
            proven_on=_X86,
        ),
    ]


def _cpu_kernel(
    op: str, module: str, predicate: str, dims: dict[str, Dim], dtypes: tuple[str, ...] = _FLOATS
) -> Kernel:
    return Kernel(
        op,
        f"{op}_vllm",
        f"{_OPS}.{module}:{op}",
        "cpu",
        Requires(dtypes=dtypes, dims=dims),
        predicate=f"{_OPS}.predicates:check_{predicate}",
        score=_SCORE,
        properties=_DETERMINISTIC,
        proven_on=_X86,
    )


def _gpu_kernels() -> list[Record]:
    return [
        Kernel(
            op,
            f"{op}_vllm_{platform}",
            f"{_OPS}.elementwise:{op}",
            platform,
            Requires(dtypes=_FLOATS),
            predicate=f"{_OPS}.predicates:check_{op}",
            score=_SCORE,
            properties=_OPAQUE,
            proven_on=_NOT_PROVEN,
        )
        for platform in _GPUS
        for op in ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul")
    ]
