"""Example settings of bitsandbytes checkpoints, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bitsandbytes_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings of every format, with and without double quantization, by label."""
    four_bit = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16"}
    settings: Mapping[str, Mapping[str, Any]] = {
        "nf4": {**four_bit, "bnb_4bit_quant_type": "nf4"},
        "nf4, double": {
            **four_bit,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["lm_head"],
        },
        "fp4": {**four_bit, "bnb_4bit_quant_type": "fp4"},
        "fp4, double": {
            **four_bit,
            "bnb_4bit_quant_type": "fp4",
            "bnb_4bit_use_double_quant": True,
        },
        "int8": {"load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0},
    }
    return {label: {"quant_method": "bitsandbytes", **fields} for label, fields in settings.items()}
