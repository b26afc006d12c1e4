"""Products of 8-bit floats are those of the op, in the format that the hardware multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interposer import Capability, Request
from interposer.records import Kernel
from interposer.testing import check_kernel
from interposer_ops.fp8_linear import fp8_linear
from interposer_rocm.plugin import interposer_records
from interposer_rocm.scaled_products import fp8_linear_of_halves, halved, prepare_halves
from interposer_rocm.scaled_products_judge import judge

CODES = torch.arange(256, dtype=torch.int64).to(torch.uint8)
RECORDS = {record.name: record for record in interposer_records() if isinstance(record, Kernel)}
DIMS: dict[str, Any] = {
    "in_features": 256,
    "out_features": 512,
    "x_dtype": "float8_e4m3fn",
    "weight_dtype": "float8_e4m3fn",
    "x_scales": "token",
    "weight_scales": "channel",
}


def test_every_code_is_halved_exactly() -> None:
    values = CODES.view(torch.float8_e4m3fn)
    half = halved(values)
    assert half.dtype == torch.float8_e4m3fnuz
    numbers, twice = values.float(), half.float() * 2
    assert torch.equal(numbers.isnan(), twice.isnan())
    assert int(numbers.isnan().sum()) == 2
    there = ~numbers.isnan()
    assert torch.equal(numbers[there], twice[there])


def test_bits_are_those_of_the_other_format_but_for_two() -> None:
    same = CODES.view(torch.float8_e4m3fn)
    changed = (halved(same).view(torch.uint8) != CODES).nonzero().flatten().tolist()
    assert changed == [0x7F, 0x80, 0xFF]


def test_products_of_halves_are_those_of_the_op() -> None:
    """torch multiplies fnuz on the processor as well; sizes are those that it takes there."""
    checked = 0
    for case in fp8_linear.cases(torch.bfloat16, 0):
        x, weight = case.arguments["x"], case.arguments["weight"]
        formats = {x.dtype, weight.dtype}
        if formats != {torch.float8_e4m3fn} or weight.shape[0] % 16 or weight.shape[1] % 16:
            continue
        checked += 1
        faults = check_kernel(fp8_linear, fp8_linear_of_halves, case, prepare=prepare_halves)
        assert faults == [], case.label
    assert checked >= 3


@pytest.mark.parametrize(
    ("changes", "dtype", "expected"),
    [
        ({}, "bfloat16", ""),
        ({}, "float16", "scales of rows need results of bfloat16, got float16"),
        ({"x_scales": "tensor", "weight_scales": "tensor"}, "float16", ""),
        ({"weight_dtype": "float8_e4m3fnuz"}, "bfloat16", "takes float8_e4m3fn, weight_dtype is"),
        ({"x_dtype": "float8_e5m2"}, "bfloat16", "takes float8_e4m3fn, x_dtype is float8_e5m2"),
        ({"in_features": 264}, "bfloat16", "in_features is 264, must be a multiple of 16"),
    ],
)
def test_what_the_operator_takes(changes: dict[str, Any], dtype: str, expected: str) -> None:
    request = Request("kernel", "fp8_linear", "rocm", dtype=dtype, dims={**DIMS, **changes})
    verdict = judge(request)
    assert verdict.accepted == (not expected)
    assert verdict.reason.startswith(expected)


@pytest.mark.parametrize(
    ("architecture", "features", "fitting"),
    [
        ("gfx942", {"fp8_fnuz"}, ["fp8_linear_hipblaslt_fnuz"]),
        ("gfx950", {"fp8_ocp"}, ["fp8_linear_hipblaslt"]),
        ("gfx1201", {"fp8_ocp"}, ["fp8_linear_hipblaslt"]),
        ("gfx90a", set(), []),
        ("gfx1100", set(), []),
    ],
)
def test_each_gpu_gets_the_product_of_its_format(
    architecture: str, features: set[str], fitting: list[str]
) -> None:
    capability = Capability(architecture, frozenset(features))
    request = Request("kernel", "fp8_linear", "rocm", capability, "bfloat16", DIMS)
    own = [record for record in RECORDS.values() if record.op == "fp8_linear"]
    assert [record.name for record in own if record.requires.judge(request)] == fitting
