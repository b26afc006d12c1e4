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
        SchemeEntry(
            "gptq",
            "gptq",
            "interposer_quantization.gptq:GPTQ",
            examples="interposer_quantization.examples:gptq_examples",
        ),
        SchemeEntry(
            "awq",
            "awq",
            "interposer_quantization.awq:AWQ",
            examples="interposer_quantization.examples:awq_examples",
        ),
        SchemeEntry(
            "fp8",
            "fp8",
            "interposer_quantization.fp8:Fp8",
            examples="interposer_quantization.examples:fp8_examples",
        ),
        SchemeEntry(
            "fbgemm_fp8",
            "fbgemm_fp8",
            "interposer_quantization.fp8:FbgemmFp8",
            examples="interposer_quantization.examples:fbgemm_fp8_examples",
        ),
    ]
