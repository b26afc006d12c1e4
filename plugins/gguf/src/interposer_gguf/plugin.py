"""Records of the GGUF plugin, which name code by import string and import none."""

from __future__ import annotations

from collections.abc import Mapping

from interposer.hookspecs import hookimpl
from interposer.records import CheckpointEntry, Kernel, OpEntry, Record, SchemeEntry
from interposer.requires import Dim, Requires

INTERPOSER_API = ">=1.0,<2"

_PROMISES = frozenset({"deterministic", "traceable"})
_OPAQUE = frozenset({"deterministic", "opaque"})
_FLOATS = ("float32", "bfloat16", "float16")
# The kernels of other ops support only the group size of GGUF blocks. A low score ranks these
# kernels below the specialized kernels of the ops.
_GROUPS: Mapping[str, Dim] = {"group_size": Dim(one_of=(32,))}
# All formats of _block_formats.py, repeated here because discovery must not import torch.
_FORMATS = Dim(one_of=("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"))
_KERNELS: tuple[tuple[str, Mapping[str, Dim], float], ...] = (
    ("gguf_linear", {}, 10.0),
    ("w4a16_linear", _GROUPS, 5.0),
    ("w8a16_linear", _GROUPS, 5.0),
)


@hookimpl
def interposer_records() -> list[Record]:
    """Declare the GGUF file format, the quantization scheme, two ops and CPU kernels."""
    return [
        CheckpointEntry(".gguf", "gguf", "interposer_gguf._checkpoint:GGUFCheckpoint"),
        SchemeEntry(
            "gguf",
            "gguf",
            "interposer_gguf._scheme:GGUF",
            examples="interposer_gguf._scheme:examples",
        ),
        OpEntry("gguf_linear", "interposer_gguf._linear:gguf_linear", _PROMISES),
        OpEntry("gguf_embedding", "interposer_gguf._embedding:gguf_embedding", _PROMISES),
        Kernel(
            "gguf_linear",
            "gguf_linear_native",
            "interposer_gguf._native_linear:gguf_linear",
            "cpu",
            Requires(dtypes=("float32", "bfloat16"), dims={"stored_as": _FORMATS}),
            predicate="interposer_gguf._native_library:check_library",
            score=20.0,
            properties=_OPAQUE,
        ),
        Kernel(
            "gguf_embedding",
            "gguf_embedding_native",
            "interposer_gguf._native_linear:gguf_embedding",
            "cpu",
            Requires(dtypes=_FLOATS, dims={"stored_as": _FORMATS}),
            predicate="interposer_gguf._native_library:check_library",
            score=20.0,
            properties=_OPAQUE,
        ),
        # For an embedding that is tied to an LM head: the lookup must read the same bytes, so the
        # head's kernel must not repack the weight.
        Kernel(
            "gguf_linear",
            "gguf_linear_as_stored",
            "interposer_gguf._kernels:gguf_linear",
            "cpu",
            Requires(dtypes=_FLOATS),
            score=8.0,
            properties=_OPAQUE,
        ),
        *(
            Kernel(
                op,
                f"{op}_by_rows",
                f"interposer_gguf._kernels:{op}",
                "cpu",
                Requires(dtypes=_FLOATS, dims=dims),
                prepare="interposer_gguf._kernels:pack_halves" if op == "gguf_linear" else "",
                layout=1 if op == "gguf_linear" else 0,
                score=score,
                properties=_OPAQUE,
            )
            for op, dims, score in _KERNELS
        ),
    ]
