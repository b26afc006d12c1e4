"""Plugin that registers the quantization schemes of this distribution."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Record, SchemeEntry
from interposer_quantization._retired import INSTEAD_OF

INTERPOSER_API = ">=1.0,<2"

_PACKAGE = "interposer_quantization"
# Quantization method, scheme class, and the function that returns example settings.
_SCHEMES = (
    (
        "compressed-tensors",
        "_compressed_tensors.scheme:CompressedTensors",
        "_compressed_tensors.examples:compressed_tensors_examples",
    ),
    ("gptq", "_gptq.scheme:GPTQ", "_examples:gptq_examples"),
    ("awq", "_awq.scheme:AWQ", "_examples:awq_examples"),
    ("fp8", "_fp8.scheme:Fp8", "_examples:fp8_examples"),
    ("fbgemm_fp8", "_fp8.scheme:FbgemmFp8", "_examples:fbgemm_fp8_examples"),
    ("modelopt", "_modelopt.scheme:ModelOpt", "_examples:modelopt_examples"),
    ("auto-round", "_auto_round.scheme:AutoRound", "_examples:auto_round_examples"),
    ("inc", "_auto_round.scheme:INC", "_examples:inc_examples"),
    ("torchao", "_torchao.scheme:TorchAo", "_torchao.examples:torchao_examples"),
    ("mxfp4", "_mxfp4.scheme:Mxfp4", "_mxfp4.scheme:mxfp4_examples"),
    ("online_fp8", "_online.fp8:OnlineFp8", "_online.fp8:online_fp8_examples"),
)

# Online methods by name; the value completes the class name, e.g. ``OnlineInt8``.
_ONLINE = {"int8": "Int8", "int4": "Int4", "w4a8": "W4A8"}


@hookimpl
def interposer_records() -> list[Record]:
    """Return one scheme record per checkpoint format and per online quantization method."""
    return [
        *(
            SchemeEntry(
                method,
                # Scheme names are identifiers; methods may contain hyphens.
                method.replace("-", "_"),
                f"{_PACKAGE}.{target}",
                examples=f"{_PACKAGE}.{examples}",
                instead_of=INSTEAD_OF.get(method, frozenset()),
            )
            for method, target, examples in _SCHEMES
        ),
        *(
            SchemeEntry(
                f"online_{name}",
                f"online_{name}",
                f"{_PACKAGE}._online.integers:Online{class_suffix}",
                examples=f"{_PACKAGE}._online.integers:online_{name}_examples",
            )
            for name, class_suffix in _ONLINE.items()
        ),
    ]
