"""FP8 GEMM matches the op, in the 8-bit format of the hardware."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interposer import Capability, Request
from interposer.records import Kernel
from interposer.tooling import acceptance_of
from interposer_ops.quantized_linear import fp8_linear
from interposer_rocm._scaled_gemm import fp8_linear_of_halves, halved, prepare_halves
from interposer_rocm._scaled_gemm_judge import judge
from interposer_rocm.plugin import interposer_records
from interposer_testing import check_kernel

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


def test_bits_stay_equal_except_negative_zero_and_nan() -> None:
    same = CODES.view(torch.float8_e4m3fn)
    changed = (halved(same).view(torch.uint8) != CODES).nonzero().flatten().tolist()
    assert changed == [0x7F, 0x80, 0xFF]


def multiply_fnuz(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Do what torch's operator does on gfx942; on a processor, not every build of it takes fnuz."""
    assert a.dtype == b.dtype == torch.float8_e4m3fnuz
    product = a.float() @ b.float() * scale_a * scale_b
    bias = options["bias"]
    return (product if bias is None else product + bias.float()).to(options["out_dtype"])


def test_gemm_of_halved_weights_matches_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", multiply_fnuz)
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
def test_supported_requests_are_accepted(
    changes: dict[str, Any], dtype: str, expected: str
) -> None:
    request = Request("kernel", "fp8_linear", "rocm", dtype=dtype, dims={**DIMS, **changes})
    verdict = judge(request)
    assert verdict.accepted == (not expected)
    assert verdict.reason.startswith(expected)


@pytest.mark.parametrize(
    ("architecture", "features", "fitting"),
    [
        (
            "gfx942",
            {"fp8_fnuz", "triton"},
            ["fp8_linear_hipblaslt_fnuz", "fp8_linear_hipblaslt_fnuz_split"],
        ),
        (
            "gfx950",
            {"fp8_ocp", "triton"},
            ["fp8_linear_hipblaslt", "fp8_linear_hipblaslt_split"],
        ),
        ("gfx1201", {"fp8_ocp"}, ["fp8_linear_hipblaslt"]),
        ("gfx90a", set(), []),
        ("gfx1100", set(), []),
    ],
)
def test_each_gpu_gets_the_gemm_of_its_format(
    architecture: str, features: set[str], fitting: list[str]
) -> None:
    capability = Capability(architecture, frozenset(features))
    request = Request("kernel", "fp8_linear", "rocm", capability, "bfloat16", DIMS)
    own = [record for record in RECORDS.values() if record.op == "fp8_linear"]
    taken = [record.name for record in own if acceptance_of(record)(request)]
    assert taken == fitting


@pytest.mark.parametrize(("rows", "is_split"), [(1, True), (16, True), (17, False)])
def test_few_rows_use_split_k(rows: int, is_split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split operands get numbers and scales that mean the same; the processor multiplies them."""
    split = pytest.importorskip("interposer_rocm._split_gemm", reason="needs the package triton")
    calls = []

    def multiply(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return fp8_linear.reference(*arguments)

    monkeypatch.setattr(split, "fp8_linear_split", multiply)
    monkeypatch.setattr(split, "fp8_linear_scaled_mm", fp8_linear.reference)
    x, weight = (torch.randn(n, 32).to(torch.float8_e4m3fn) for n in (rows, 48))
    x_scale, weight_scale = torch.rand(rows, 1) + 0.5, torch.rand(48) + 0.5
    given = (x_scale, weight_scale, None, torch.bfloat16)
    expected = fp8_linear.reference(x, weight, *given)
    half = prepare_halves(weight, weight_scale, None)
    out = split.fp8_linear_of_halves(
        *(x, half["weight"], x_scale, half["weight_scale"], None, torch.bfloat16)
    )
    torch.testing.assert_close(out, expected)
    assert bool(calls) == is_split
    torch.testing.assert_close(split.fp8_linear(x, weight, *given), expected)
