"""The plugin record of the checkpoint formats."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Record, SchemeEntry
from interposer_quantization._retired import INSTEAD_OF

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
            "interposer_quantization._compressed_tensors.scheme:CompressedTensors",
            examples="interposer_quantization._compressed_tensors.examples:compressed_tensors_examples",
            instead_of=INSTEAD_OF["compressed-tensors"],
        ),
        SchemeEntry(
            "gptq",
            "gptq",
            "interposer_quantization._gptq.scheme:GPTQ",
            examples="interposer_quantization._examples:gptq_examples",
            instead_of=INSTEAD_OF["gptq"],
        ),
        SchemeEntry(
            "awq",
            "awq",
            "interposer_quantization._awq.scheme:AWQ",
            examples="interposer_quantization._examples:awq_examples",
            instead_of=INSTEAD_OF["awq"],
        ),
        SchemeEntry(
            "fp8",
            "fp8",
            "interposer_quantization._fp8.scheme:Fp8",
            examples="interposer_quantization._examples:fp8_examples",
            instead_of=INSTEAD_OF["fp8"],
        ),
        SchemeEntry(
            "fbgemm_fp8",
            "fbgemm_fp8",
            "interposer_quantization._fp8.scheme:FbgemmFp8",
            examples="interposer_quantization._examples:fbgemm_fp8_examples",
            instead_of=INSTEAD_OF["fbgemm_fp8"],
        ),
        SchemeEntry(
            "modelopt",
            "modelopt",
            "interposer_quantization._modelopt.scheme:ModelOpt",
            examples="interposer_quantization._examples:modelopt_examples",
            instead_of=INSTEAD_OF["modelopt"],
        ),
        SchemeEntry(
            "auto-round",
            "auto_round",
            "interposer_quantization._auto_round.scheme:AutoRound",
            examples="interposer_quantization._examples:auto_round_examples",
            instead_of=INSTEAD_OF["auto-round"],
        ),
        SchemeEntry(
            "inc",
            "inc",
            "interposer_quantization._auto_round.scheme:INC",
            examples="interposer_quantization._examples:inc_examples",
        ),
        SchemeEntry(
            "torchao",
            "torchao",
            "interposer_quantization._torchao.scheme:TorchAo",
            examples="interposer_quantization._torchao.examples:torchao_examples",
        ),
        SchemeEntry(
            "mxfp4",
            "mxfp4",
            "interposer_quantization._mxfp4.scheme:Mxfp4",
            examples="interposer_quantization._mxfp4.scheme:mxfp4_examples",
        ),
        SchemeEntry(
            "online_fp8",
            "online_fp8",
            "interposer_quantization._online.fp8:OnlineFp8",
            examples="interposer_quantization._online.fp8:online_fp8_examples",
        ),
        *(
            SchemeEntry(
                f"online_{name}",
                f"online_{name}",
                f"interposer_quantization._online.integers:Online{written}",
                examples=f"interposer_quantization._online.integers:online_{name}_examples",
            )
            for name, written in _ONLINE.items()
        ),
    ]
