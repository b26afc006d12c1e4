"""Settings of checkpoints that the schemes take, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["compressed_tensors_examples"]

_STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "int8 per output": {"strategy": "channel"},
    "int8 per group of 128 inputs": {"strategy": "group", "group_size": 128},
    "int8 per group of 32 inputs": {"strategy": "group", "group_size": 32},
}


def compressed_tensors_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings of every strategy that is supported, by label."""
    return {
        label: {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
        }
        for label, weights in _STRATEGIES.items()
    }
