"""Records of vLLM's ops as kernels. Neither this module nor what it imports needs torch or vLLM."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Kernel, Record
from interposer.requires import Dim, Requires

INTERPOSER_API = ">=1.0,<2"

_OPS = "interposer_vllm._ops"
_FLOATS = ("float32", "bfloat16", "float16")
# The ops have no fake kernels of their own, and nothing is known of what a compiler may do to them.
_OPAQUE = frozenset({"opaque"})
_DETERMINISTIC = _OPAQUE | {"deterministic"}
# Kernels that were written for the processor go before, torch's own behind.
_SCORE = 4.0
# Loops on processors go by whole vectors.
_VECTOR = Dim(multiple_of=16)
_X86 = frozenset({"x86_64"})
# Nobody has run these on a GPU: what is proven goes before them, unless they are wished for or were
# measured on the host.
_NOWHERE: frozenset[str] = frozenset()
_GPUS = ("cuda", "rocm")


@hookimpl
def interposer_records() -> list[Record]:
    """Return the kernels of processors, which were compared with the references, and of GPUs."""
    return [*_on_processors(), *_on_gpus()]


def _on_processors() -> list[Record]:
    hidden, inner = {"hidden_size": _VECTOR}, {"intermediate_size": _VECTOR}
    symmetric = {**hidden, "asymmetric": Dim(one_of=(False,))}
    tanh = {**inner, "approximate": Dim(one_of=("tanh",))}
    return [
        _on_processor("rms_norm", "elementwise", "rms_norm", hidden),
        _on_processor("fused_add_rms_norm", "elementwise", "fused_add_rms_norm", hidden),
        _on_processor("silu_and_mul", "elementwise", "silu_and_mul", inner),
        _on_processor("gelu_and_mul", "elementwise", "gelu_and_mul", inner),
        _on_processor("gelu", "elementwise", "gelu", tanh),
        _on_processor("quick_gelu", "elementwise", "quick_gelu", inner),
        _on_processor("rotary_embedding", "rotary", "rotary", {}, ("float32",)),
        _on_processor("rotary_embedding_interleaved", "rotary", "rotary", {}, ("float32",)),
        # A zero point is added before the quotient is rounded, which makes another code of a tie.
        _on_processor("quantize_int8_static", "quantizers", "static_int8", symmetric),
        _on_processor("quantize_int8_per_token", "quantizers", "dynamic_int8", hidden),
        # Of float16 it ends the process where the processor cannot multiply matrices of it.
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
            predicate=f"{_OPS}.judges:judge_packed_linear",
            prepare=f"{_OPS}.linear:prepare",
            score=_SCORE,
            properties=_DETERMINISTIC,
            proven_on=_X86,
        ),
    ]


def _on_processor(
    op: str, module: str, judge: str, dims: dict[str, Dim], dtypes: tuple[str, ...] = _FLOATS
) -> Kernel:
    return Kernel(
        op,
        f"{op}_vllm",
        f"{_OPS}.{module}:{op}",
        "cpu",
        Requires(dtypes=dtypes, dims=dims),
        predicate=f"{_OPS}.judges:judge_{judge}",
        score=_SCORE,
        properties=_DETERMINISTIC,
        proven_on=_X86,
    )


def _on_gpus() -> list[Record]:
    return [
        Kernel(
            op,
            f"{op}_vllm_{platform}",
            f"{_OPS}.elementwise:{op}",
            platform,
            Requires(dtypes=_FLOATS),
            predicate=f"{_OPS}.judges:judge_{op}",
            score=_SCORE,
            properties=_OPAQUE,
            proven_on=_NOWHERE,
        )
        for platform in _GPUS
        for op in ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul")
    ]
