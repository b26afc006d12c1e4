"""The plugin record of the checkpoint formats."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Record, SchemeEntry
from interposer_quantization.retired import INSTEAD_OF

INTERPOSER_API = ">=1.0,<2"

# What plain weights are quantized to while they load, and how classes spell it.
_ONLINE = {"int8": "Int8", "int4": "Int4", "w4a8": "W4A8"}


@hookimpl
def interposer_records() -> list[Record]:
    """Return the schemes that read checkpoints."""
    return [
        SchemeEntry(
            "compressed-tensors",
            "compressed_tensors",
            "interposer_quantization.compressed_tensors:CompressedTensors",
            examples="interposer_quantization.compressed_examples:compressed_tensors_examples",
            instead_of=INSTEAD_OF["compressed-tensors"],
        ),
        SchemeEntry(
            "gptq",
            "gptq",
            "interposer_quantization.gptq:GPTQ",
            examples="interposer_quantization.examples:gptq_examples",
            instead_of=INSTEAD_OF["gptq"],
        ),
        SchemeEntry(
            "awq",
            "awq",
            "interposer_quantization.awq:AWQ",
            examples="interposer_quantization.examples:awq_examples",
            instead_of=INSTEAD_OF["awq"],
        ),
        SchemeEntry(
            "fp8",
            "fp8",
            "interposer_quantization.fp8:Fp8",
            examples="interposer_quantization.examples:fp8_examples",
            instead_of=INSTEAD_OF["fp8"],
        ),
        SchemeEntry(
            "fbgemm_fp8",
            "fbgemm_fp8",
            "interposer_quantization.fp8:FbgemmFp8",
            examples="interposer_quantization.examples:fbgemm_fp8_examples",
            instead_of=INSTEAD_OF["fbgemm_fp8"],
        ),
        SchemeEntry(
            "modelopt",
            "modelopt",
            "interposer_quantization.modelopt:ModelOpt",
            examples="interposer_quantization.examples:modelopt_examples",
            instead_of=INSTEAD_OF["modelopt"],
        ),
        SchemeEntry(
            "auto-round",
            "auto_round",
            "interposer_quantization.auto_round:AutoRound",
            examples="interposer_quantization.examples:auto_round_examples",
            instead_of=INSTEAD_OF["auto-round"],
        ),
        SchemeEntry(
            "inc",
            "inc",
            "interposer_quantization.auto_round:INC",
            examples="interposer_quantization.examples:inc_examples",
        ),
        SchemeEntry(
            "torchao",
            "torchao",
            "interposer_quantization.torchao:TorchAo",
            examples="interposer_quantization.torchao_examples:torchao_examples",
        ),
        SchemeEntry(
            "mxfp4",
            "mxfp4",
            "interposer_quantization.mxfp4:Mxfp4",
            examples="interposer_quantization.mxfp4:mxfp4_examples",
        ),
        SchemeEntry(
            "online_fp8",
            "online_fp8",
            "interposer_quantization.online_fp8:OnlineFp8",
            examples="interposer_quantization.online_fp8:online_fp8_examples",
        ),
        *(
            SchemeEntry(
                f"online_{name}",
                f"online_{name}",
                f"interposer_quantization.online_integers:Online{written}",
                examples=f"interposer_quantization.online_integers:online_{name}_examples",
            )
            for name, written in _ONLINE.items()
        ),
    ]
