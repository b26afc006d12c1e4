"""Predicates, ahead-of-time builds and launchers of the portable Triton kernels, for platforms.

Every name is loaded on first use: the predicates (``judge*``) work without triton installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops._records import triton_kernels
    from interposer_ops._triton.availability import (
        INTERPRETER,
        MOST_SPLIT_ROWS,
        judge,
        judge_package,
        judge_split,
    )
    from interposer_ops._triton.build import Build
    from interposer_ops._triton.builds import BUILDS
    from interposer_ops._triton.parameters import assumed
    from interposer_ops.linear._split_linear_triton import fp8_linear_split, linear_split
    from interposer_ops.quantized_linear._microscaled_linear_triton import (
        mxfp8_linear_triton,
        nvfp4_linear_triton,
    )
    from interposer_ops.quantized_linear._scaled_linear_triton import fp8_block_linear_triton

__all__ = [
    "BUILDS",
    "INTERPRETER",
    "MOST_SPLIT_ROWS",
    "Build",
    "assumed",
    "fp8_block_linear_triton",
    "fp8_linear_split",
    "judge",
    "judge_package",
    "judge_split",
    "linear_split",
    "mxfp8_linear_triton",
    "nvfp4_linear_triton",
    "triton_kernels",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops._records": "triton_kernels",
        "interposer_ops._triton.availability": (
            "INTERPRETER MOST_SPLIT_ROWS judge judge_package judge_split"
        ),
        "interposer_ops._triton.build": "Build",
        "interposer_ops._triton.builds": "BUILDS",
        "interposer_ops._triton.parameters": "assumed",
        "interposer_ops.linear._split_linear_triton": "fp8_linear_split linear_split",
        "interposer_ops.quantized_linear._microscaled_linear_triton": (
            "mxfp8_linear_triton nvfp4_linear_triton"
        ),
        "interposer_ops.quantized_linear._scaled_linear_triton": "fp8_block_linear_triton",
    },
)


def __dir__() -> list[str]:
    return __all__
