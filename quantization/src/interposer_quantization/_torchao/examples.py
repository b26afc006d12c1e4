"""Example settings of torchao checkpoints, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FLOAT8 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}


def torchao_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return torchao settings of every granularity, with and without zero points, by label."""
    # torchao writes a row as PerRow or PerAxis, depending on the configuration.
    row = _config_object("PerRow", dim=-1)
    axis, groups = _config_object("PerAxis", axis=0), _config_object("PerGroup", group_size=32)
    configs_by_label = {
        "8 bits per row": _config_object("Int8WeightOnlyConfig", 2, granularity=row),
        "8 bits per group": _config_object("Int8WeightOnlyConfig", 2, granularity=groups),
        "any bits per row": _intx_config("int8", axis, "SYMMETRIC"),
        "any bits per group, asymmetric": _intx_config("int4", groups, "ASYMMETRIC"),
        "8-bit floats per row": _config_object(
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
        configs_by_label[label] = _config_object(
            "Int8DynamicActivationInt8WeightConfig",
            2,
            granularity=row,
            act_mapping_type={"_type": "MappingType", "_data": mapping},
        )
    for label, granularity, mapping in (
        ("any bits per row, int8 inputs", axis, "SYMMETRIC"),
        ("any bits per group, int8 inputs", groups, "ASYMMETRIC"),
    ):
        configs_by_label[label] = _config_object(
            "Int8DynamicActivationIntxWeightConfig",
            2,
            weight_granularity=granularity,
            weight_dtype={"_type": "torch.dtype", "_data": "int4"},
            weight_mapping_type={"_type": "MappingType", "_data": mapping},
            act_mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"},
            intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        )
    configs_by_label["8-bit floats, weights only"] = _config_object(
        "Float8WeightOnlyConfig", 2, granularity=row, weight_dtype=_FLOAT8
    )
    return {
        label: {"quant_method": "torchao", "quant_type": {"default": config_object}}
        for label, config_object in configs_by_label.items()
    }


def _config_object(name: str, version: int = 1, **fields: Any) -> dict[str, Any]:
    return {"_type": name, "_version": version, "_data": fields}


def _intx_config(dtype: str, granularity: dict[str, Any], mapping: str) -> dict[str, Any]:
    return _config_object(
        "IntxWeightOnlyConfig",
        2,
        granularity=granularity,
        weight_dtype={"_type": "torch.dtype", "_data": dtype},
        mapping_type={"_type": "MappingType", "_data": mapping},
        intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
    )
