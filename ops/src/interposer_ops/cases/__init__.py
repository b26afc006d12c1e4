"""Parts of the standard ops' cases, to build the cases of ops in other distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops._case_numbers import normal_numbers
    from interposer_ops.embedding._embedding_cases import TOKENS
    from interposer_ops.experts._expert_bounds_cases import bounded_case, routed, shape_of, spread
    from interposer_ops.quantized_linear._quantized_linear_cases import (
        bias_of,
        linear_case,
        sampled_case,
    )
    from interposer_ops.quantized_linear._weight_only_linear_cases import (
        w4a16_linear_sample,
        w8a16_linear_sample,
    )

# fmt: off
__all__ = [
    "TOKENS", "bias_of", "bounded_case", "linear_case", "normal_numbers", "routed",
    "sampled_case", "shape_of", "spread", "w4a16_linear_sample", "w8a16_linear_sample",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops._case_numbers": "normal_numbers",
        "interposer_ops.embedding._embedding_cases": "TOKENS",
        "interposer_ops.experts._expert_bounds_cases": "bounded_case routed shape_of spread",
        "interposer_ops.quantized_linear._quantized_linear_cases": (
            "bias_of linear_case sampled_case"
        ),
        "interposer_ops.quantized_linear._weight_only_linear_cases": (
            "w4a16_linear_sample w8a16_linear_sample"
        ),
    },
)


def __dir__() -> list[str]:
    return __all__
