"""Plugin that registers op, CPU kernel and scheme by import string, without an import."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Kernel, OpEntry, Record, SchemeEntry
from interposer.requires import Requires

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[Record]:
    """Return the records of the op ``nf4_linear``, a CPU kernel, and the scheme."""
    return [
        OpEntry(
            "nf4_linear",
            "interposer_nf4._codebook_linear:nf4_linear",
            frozenset({"deterministic", "graph_safe", "traceable"}),
            emulation="dequantizes, then multiplies floats",
        ),
        Kernel(
            "nf4_linear",
            "nf4_linear_byte_table",
            "interposer_nf4._byte_table:nf4_linear",
            "cpu",
            Requires(dtypes=("float32", "bfloat16", "float16")),
            prepare="interposer_nf4._byte_table:prepare",
            # Opaque, because a trace would unroll the loop over all panels of a large layer.
            properties=frozenset({"deterministic", "opaque"}),
        ),
        SchemeEntry(
            "bitsandbytes",
            "bitsandbytes",
            "interposer_nf4._bitsandbytes:BitsAndBytes",
            examples="interposer_nf4._examples:bitsandbytes_examples",
        ),
    ]
