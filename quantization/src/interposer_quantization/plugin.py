"""The plugin record of the checkpoint formats."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Record, SchemeEntry

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[Record]:
    """Return the schemes that read checkpoints."""
    return [
        SchemeEntry(
            "compressed-tensors",
            "compressed_tensors",
            "interposer_quantization.compressed_tensors:CompressedTensors",
            examples="interposer_quantization.examples:compressed_tensors_examples",
        ),
    ]
