"""Settings of torchao checkpoints that the scheme takes, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FLOAT8 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}


def torchao_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings of every granularity, with and without zero points, by label."""
    row = _tagged("PerRow", dim=-1)
    axis, groups = _tagged("PerAxis", axis=0), _tagged("PerGroup", group_size=32)
    kinds = {
        "8 bits per row": _tagged("Int8WeightOnlyConfig", 2, granularity=row),
        "8 bits per group": _tagged("Int8WeightOnlyConfig", 2, granularity=groups),
        "any bits per row": _of_any_bits("int8", axis, "SYMMETRIC"),
        "any bits per group, asymmetric": _of_any_bits("int4", groups, "ASYMMETRIC"),
        "8-bit floats per row": _tagged(
            "Float8DynamicActivationFloat8WeightConfig",
            2,
            granularity=[row, row],
            activation_dtype=_FLOAT8,
            weight_dtype=_FLOAT8,
            packing_format={"_type": "Float8PackingFormat", "_data": "PLAIN"},
        ),
    }
    for label, mapping in (
        ("8 bits, int8 inputs", "SYMMETRIC"),
        ("asymmetric inputs", "ASYMMETRIC"),
    ):
        kinds[label] = _tagged(
            "Int8DynamicActivationInt8WeightConfig",
            2,
            granularity=row,
            act_mapping_type={"_type": "MappingType", "_data": mapping},
        )
    for label, granularity, mapping in (
        ("any bits per row, int8 inputs", axis, "SYMMETRIC"),
        ("any bits per group, int8 inputs", groups, "ASYMMETRIC"),
    ):
        kinds[label] = _tagged(
            "Int8DynamicActivationIntxWeightConfig",
            2,
            weight_granularity=granularity,
            weight_dtype={"_type": "torch.dtype", "_data": "int4"},
            weight_mapping_type={"_type": "MappingType", "_data": mapping},
            act_mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"},
            intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        )
    kinds["8-bit floats, weights only"] = _tagged(
        "Float8WeightOnlyConfig", 2, granularity=row, weight_dtype=_FLOAT8
    )
    return {
        label: {"quant_method": "torchao", "quant_type": {"default": kind}}
        for label, kind in kinds.items()
    }


def _tagged(name: str, version: int = 1, **fields: Any) -> dict[str, Any]:
    return {"_type": name, "_version": version, "_data": fields}


def _of_any_bits(dtype: str, granularity: dict[str, Any], mapping: str) -> dict[str, Any]:
    return _tagged(
        "IntxWeightOnlyConfig",
        2,
        granularity=granularity,
        weight_dtype={"_type": "torch.dtype", "_data": dtype},
        mapping_type={"_type": "MappingType", "_data": mapping},
        intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
    )
