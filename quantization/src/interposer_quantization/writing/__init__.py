"""Quantization for writing checkpoints: weight formats, round to nearest, and GPTQ rounding.

Every name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_quantization.writing._schemes import quantization_config, weight_format
    from interposer_quantization.writing._second_order import (
        Curvature,
        SecondMoments,
        second_order_rounded,
    )
    from interposer_quantization.writing._weight_format import WeightFormat, tensor_peak

__all__ = [
    "Curvature",
    "SecondMoments",
    "WeightFormat",
    "quantization_config",
    "second_order_rounded",
    "tensor_peak",
    "weight_format",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_quantization.writing._schemes": "quantization_config weight_format",
        "interposer_quantization.writing._second_order": (
            "Curvature SecondMoments second_order_rounded"
        ),
        "interposer_quantization.writing._weight_format": "WeightFormat tensor_peak",
    },
)


def __dir__() -> list[str]:
    return __all__
