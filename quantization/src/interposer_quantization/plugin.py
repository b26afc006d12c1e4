"""The plugin record of the quantized ops and the checkpoint formats."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import OpEntry, Record, SchemeEntry

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[Record]:
    """Return the ops of quantized layers and the schemes that read checkpoints."""
    return [
        OpEntry(
            "w8a16_linear",
            "interposer_quantization.quantized_linear:w8a16_linear",
            frozenset({"deterministic", "graph_safe", "traceable"}),
        ),
        SchemeEntry(
            "compressed-tensors",
            "compressed_tensors",
            "interposer_quantization.compressed_tensors:CompressedTensors",
        ),
    ]
