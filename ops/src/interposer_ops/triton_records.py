"""The records of the Triton kernels and of the platform that interprets them; light."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from interposer.records import Kernel, PlatformEntry, Record
from interposer.requires import Dim, Requires

__all__ = ["triton_records"]

_FLOATS = ("float32", "bfloat16", "float16")
_FEATURES = frozenset({"triton"})
_JUDGE = "interposer_ops.triton_availability:judge"
_JUDGE_FP8 = "interposer_ops.triton_availability:judge_fp8"
# By construction: no atomic adds, sums of a row in an order that its width alone decides, no
# synchronisation and no allocation but of the result.
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

_ROWS = (
    _Row("rms_norm", "norms"),
    _Row("fused_add_rms_norm", "norms"),
    _Row("gemma_rms_norm", "norms"),
    _Row("fused_add_gemma_rms_norm", "norms"),
    _Row("layer_norm", "norms"),
    *(_Row(op, "activations") for op in _ACTIVATIONS),
    _Row("rotary_embedding", "rotary"),
    _Row("rotary_embedding_interleaved", "rotary"),
    _Row("reshape_and_cache", "kv_cache"),
    _Row("reshape_and_cache_fp8", "kv_cache", judge=_JUDGE_FP8),
)


def triton_records() -> list[Record]:
    """Return all Triton kernels, and the platform ``interpreter``."""
    kernels = [
        Kernel(
            row.op,
            f"{row.op}_triton",
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
