"""Kernels of this platform give right results on the processor."""

from __future__ import annotations

import torch

from interposer.testing import check_kernel
from interposer_cuda.grouped_linear import grouped_linear as grouped_linear_grouped_mm
from interposer_ops.linear import grouped_linear


def test_grouped_products_are_those_of_the_op() -> None:
    checked = 0
    for case in grouped_linear.cases(torch.bfloat16, 0):
        x, weight = case.arguments["x"], case.arguments["weight"]
        if weight.shape[1] % 8 or weight.shape[2] % 8:
            continue
        checked += 1
        faults = check_kernel(grouped_linear, grouped_linear_grouped_mm, case)
        assert faults == [], (case.label, tuple(x.shape))
    assert checked >= 10
