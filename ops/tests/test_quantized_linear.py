"""The quantized linears against products of what is dequantized in float64, and their traps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interposer import Case, CustomOp
from interposer_ops.quantized_linear import (
    fp8_block_linear,
    fp8_linear,
    int8_linear,
    mxfp4_linear,
    mxfp8_linear,
    nvfp4_linear,
    w4a8_linear,
    w4a16_linear,
    w8a16_linear,
)
from interposer_ops.quantizers import (
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases

Arguments = dict[str, Any]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    codes = torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=torch.int64)
    codes[..., 0::2], codes[..., 1::2] = packed % 16, packed // 16
    return codes


def at_columns(scales: torch.Tensor, width: int, size: int) -> torch.Tensor:
    """Return the scale of every column, looked up by its index."""
    return scales.double()[..., torch.arange(width) // size]


def powers(exponents: torch.Tensor) -> torch.Tensor:
    return torch.pow(2.0, exponents.double() - 127)


def fp8_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    weight = a["weight"].double() * a["weight_scale"].double().view(-1, 1)
    return a["x"].double() * a["x_scale"].double(), weight


def fp8_block_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    (height, width), size = a["weight"].shape, a["block_columns"]
    of_rows = a["weight_scales"][torch.arange(height) // a["block_rows"]]
    x = a["x"].double() * at_columns(a["x_scales"], width, size)
    return x, a["weight"].double() * at_columns(of_rows, width, size)


def int8_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    zero = 0 if a["x_zero_point"] is None else a["x_zero_point"]
    x = (a["x"].long() - zero).double() * a["x_scale"].double()
    return x, a["weight"].double() * a["weight_scale"].double().view(-1, 1)


def grouped(codes: torch.Tensor, a: Arguments, middle: int) -> torch.Tensor:
    width = codes.shape[1]
    scale = a["scale"].reshape(len(codes), -1)
    size = width // scale.shape[1]
    zero = middle if a["zero_points"] is None else at_columns(a["zero_points"], width, size)
    return (codes.double() - zero) * at_columns(scale, width, size)


def w4_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return a["x"].double(), grouped(nibbles(a["weight"]), a, 8)


def w8_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return a["x"].double(), grouped(a["weight"], a, 0)


def w4a8_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    zero = 0 if a["x_zero_point"] is None else a["x_zero_point"]
    x = (a["x"].long() - zero).double() * a["x_scale"].double()
    parts = {"scale": a["weight_scales"], "zero_points": a["weight_zero_points"]}
    return x, grouped(nibbles(a["weight"]), parts, 8)


def mxfp4_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    weight = E2M1[nibbles(a["weight"])]
    return a["x"].double(), weight * at_columns(powers(a["weight_scales"]), weight.shape[1], 32)


def mxfp8_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    width = a["weight"].shape[1]
    x = a["x"].double() * at_columns(powers(a["x_scales"]), width, 32)
    return x, a["weight"].double() * at_columns(powers(a["weight_scales"]), width, 32)


def nvfp4_operands(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = (E2M1[nibbles(a[name])] for name in ("x", "weight"))
    x = x * at_columns(a["x_scales"].double(), x.shape[-1], 16) * float(a["alpha"])
    return x, weight * at_columns(a["weight_scales"].double(), weight.shape[1], 16)


Operands = Callable[[Arguments], tuple[torch.Tensor, torch.Tensor]]
LINEARS: dict[CustomOp[..., Any], Operands] = {
    fp8_linear: fp8_operands,
    fp8_block_linear: fp8_block_operands,
    int8_linear: int8_operands,
    w4a8_linear: w4a8_operands,
    w4a16_linear: w4_operands,
    w8a16_linear: w8_operands,
    mxfp4_linear: mxfp4_operands,
    mxfp8_linear: mxfp8_operands,
    nvfp4_linear: nvfp4_operands,
}
each_linear = pytest.mark.parametrize("op", LINEARS, ids=lambda op: op.name)


@pytest.mark.landing(3)
@each_linear
def test_references_against_float64(op: CustomOp[..., Any]) -> None:
    for plan in planned_cases(op, 1, quick=True):
        case = plan.build()
        x, weight = LINEARS[op](dict(case.arguments))
        bias = case.arguments["bias"]
        expected = x @ weight.T + (0 if bias is None else bias.double())
        actual = op(**case.arguments)
        assert actual.dtype == plan.dtype
        bound = op.tolerance.bound(expected, plan.dtype, case)
        assert ((actual.double() - expected).abs() <= bound).all(), plan.label


@pytest.mark.landing(2)
@each_linear
def test_references_are_within_their_own_bounds(op: CustomOp[..., Any]) -> None:
    for plan in planned_cases(op, 2, quick=True):
        assert check_kernel(op, op.reference, plan.build()) == [], plan.label


def changed(**changes: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda a: {**a, **{name: change(a[name]) for name, change in changes.items()}}


def nothing(_: Any) -> None:
    return None


def first(scales: torch.Tensor) -> torch.Tensor:
    """Let the first scale of each row serve the whole of it."""
    return scales[..., :1].expand_as(scales).contiguous()


def swapped(packed: torch.Tensor) -> torch.Tensor:
    return packed << 4 | packed >> 4


def clipped(codes: torch.Tensor) -> torch.Tensor:
    return codes.clamp(min=-127)


def halved(scales: torch.Tensor) -> torch.Tensor:
    return scales.bfloat16().float()


WRONG = [
    (fp8_linear, changed(bias=nothing)),
    (fp8_linear, changed(x_scale=lambda s: s[..., :1, :] if s.ndim > 1 else s)),
    (fp8_linear, changed(weight_scale=lambda s: s[:1])),
    (fp8_linear, changed(x_scale=halved)),
    (fp8_linear, changed(x=lambda x: x.float().clamp(-448, 448).to(torch.float8_e4m3fn))),
    (fp8_block_linear, changed(bias=nothing)),
    (fp8_block_linear, changed(x_scales=first)),
    (fp8_block_linear, changed(weight_scales=first)),
    (fp8_block_linear, changed(weight_scales=lambda s: s[:1].expand_as(s))),
    (int8_linear, changed(bias=nothing)),
    (int8_linear, changed(x_zero_point=nothing)),
    (int8_linear, changed(x=clipped)),
    (int8_linear, changed(weight=clipped)),
    (int8_linear, changed(weight_scale=lambda s: s[:1])),
    (w4a8_linear, changed(bias=nothing)),
    (w4a8_linear, changed(x_zero_point=nothing)),
    (w4a8_linear, changed(x=clipped)),
    (w4a8_linear, changed(x_scale=lambda s: s.flatten()[:1])),
    (w4a8_linear, changed(weight=swapped)),
    (w4a8_linear, changed(weight_scales=first)),
    (w4a8_linear, changed(weight_scales=halved)),
    (w4a8_linear, changed(weight_zero_points=nothing)),
    (w4a8_linear, changed(weight_zero_points=lambda z: None if z is None else z + 1)),
    (w4a16_linear, changed(bias=nothing)),
    (w4a16_linear, changed(weight=swapped)),
    (w4a16_linear, changed(zero_points=nothing)),
    (w4a16_linear, changed(zero_points=lambda z: None if z is None else z + 1)),
    (w4a16_linear, changed(scale=first)),
    (w4a16_linear, changed(scale=lambda s: s.bfloat16().to(s.dtype))),
    (w8a16_linear, changed(bias=nothing)),
    (w8a16_linear, changed(weight=lambda w: w.view(torch.uint8))),
    (w8a16_linear, changed(scale=lambda s: first(s) if s.ndim == 2 else s)),
    (w8a16_linear, changed(weight=clipped)),
    (w8a16_linear, changed(scale=halved)),
    (w8a16_linear, changed(zero_points=nothing)),
    (mxfp4_linear, changed(weight=swapped)),
    (mxfp4_linear, changed(weight_scales=first)),
    (mxfp4_linear, changed(bias=nothing)),
    (mxfp8_linear, changed(x_scales=first)),
    (mxfp8_linear, changed(weight_scales=lambda s: s - 1)),
    (nvfp4_linear, changed(x=swapped)),
    (nvfp4_linear, changed(weight=swapped)),
    (nvfp4_linear, changed(alpha=torch.ones_like)),
    (nvfp4_linear, changed(x_scales=lambda s: first(s.float()))),
]


@pytest.mark.landing(24)
@pytest.mark.parametrize(("op", "change"), WRONG)
def test_cases_detect_a_wrong_kernel(
    op: CustomOp[..., Any], change: Callable[[Arguments], Arguments]
) -> None:
    def wrong(*given: Any) -> Any:
        return op.reference(**change(dict(zip(op.signature.parameters, given, strict=True))))

    def shows(case: Case) -> bool:
        return "value" in {fault.check for fault in check_kernel(op, wrong, case)}

    assert any(shows(plan.build()) for plan in planned_cases(op, 0, quick=True))


@pytest.mark.parametrize("op", [w4a16_linear, w8a16_linear], ids=lambda op: op.name)
def test_cases_state_what_a_kernel_can_require(op: CustomOp[..., Any]) -> None:
    sizes = [plan.build() for plan in planned_cases(op, 0, quick=True)]
    for case in sizes:
        scale, dims = case.arguments["scale"], case.dims
        num_groups = scale.shape[1] if scale.ndim == 2 else 1
        assert dims["num_groups"] == num_groups
        assert int(dims["num_groups"]) * int(dims["group_size"]) == dims["in_features"]
        assert dims["out_features"] == len(scale)
        assert dims["asymmetric"] == (case.arguments["zero_points"] is not None)
    assert {case.dims["num_groups"] == 1 for case in sizes} == {True, False}


def test_sums_of_int8_are_exact() -> None:
    """Half of the sum plus one is beyond the integers that float32 holds, let alone 16 bits."""
    x = torch.full((1, 4096), -128, dtype=torch.int8)
    weight = torch.full((1, 4096), 127, dtype=torch.int8)
    weight[0, 2048:] = -127
    x[0, 0] = weight[0, 0] = 1
    weight[0, -1] = 0
    unit = torch.ones(1)
    actual = int8_linear(x, weight, unit, unit, None, None, torch.float32)
    assert actual.tolist() == [[1.0]]


def test_sums_of_groups_are_exact() -> None:
    """Half of the sum plus one is beyond the integers that float32 holds."""
    x = torch.full((1, 65536), -128, dtype=torch.int8)
    codes = torch.full((1, 65536), 15, dtype=torch.uint8)
    codes[0, 32768:] = 1
    x[0, 0] = 1
    codes[0, 0], codes[0, -1] = 9, 8
    weight = codes[:, 0::2] | codes[:, 1::2] << 4
    unit = torch.ones(1, 1)
    actual = w4a8_linear(x, weight, unit, unit, None, None, None, torch.float32)
    assert actual.tolist() == [[1.0]]


def test_zero_points_are_taken_from_codes_of_both_operands() -> None:
    x = torch.tensor([[5, 7, -1, 0], [1, 2, 3, 4]], dtype=torch.int8)
    weight = torch.tensor([[0x31, 0x9F]], dtype=torch.uint8)
    x_scale = torch.tensor([[0.5], [2.0]])
    scales = torch.tensor([[1.0, 10.0]])
    actual = w4a8_linear(x, weight, x_scale, scales, None, None, None, torch.float32)
    first = 5 * (1 - 8) + 7 * (3 - 8) + 10 * (-1 * (15 - 8))
    second = 1 * (1 - 8) + 2 * (3 - 8) + 10 * (3 * (15 - 8) + 4 * (9 - 8))
    assert actual.tolist() == [[0.5 * first], [2.0 * second]]
    x_zero_point = torch.tensor([[1], [-2]], dtype=torch.int32)
    zero_points = torch.tensor([[0, 15]], dtype=torch.uint8)
    actual = w4a8_linear(x, weight, x_scale, scales, x_zero_point, zero_points, None, torch.float32)
    first = 4 * 1 + 6 * 3 + 10 * (-1 * (9 - 15))
    second = 3 * 1 + 4 * 3 + 10 * (6 * (9 - 15))
    assert actual.tolist() == [[0.5 * first], [2.0 * second]]


def test_a_zero_point_is_taken_from_every_input() -> None:
    x = torch.tensor([[5, 7], [-1, 0]], dtype=torch.int8)
    weight = torch.tensor([[2, -3]], dtype=torch.int8)
    zero_point = torch.tensor([[1], [-2]], dtype=torch.int32)
    scale = torch.tensor([[0.5], [2.0]])
    actual = int8_linear(x, weight, scale, torch.ones(1), zero_point, None, torch.float32)
    assert actual.tolist() == [[0.5 * (4 * 2 - 6 * 3)], [2.0 * (1 * 2 - 2 * 3)]]


def test_codes_of_four_bits_are_unsigned_around_eight() -> None:
    x = torch.eye(4)
    weight = torch.tensor([[0xF0, 0x87]], dtype=torch.uint8)
    scale = torch.tensor([[1.0, 10.0]])
    assert w4a16_linear(x, weight, scale, None).flatten().tolist() == [-8.0, 7.0, -10.0, 0.0]
    zero_points = torch.tensor([[15, 0]], dtype=torch.uint8)
    actual = w4a16_linear(x, weight, scale, None, zero_points)
    assert actual.flatten().tolist() == [-15.0, 0.0, 70.0, 80.0]


def test_a_flat_scale_has_one_element_per_output() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, generator=generator)
    weight = torch.randint(-128, 128, (5, 8), dtype=torch.int8, generator=generator)
    scale = torch.rand(5, generator=generator)
    assert torch.equal(
        w8a16_linear(x, weight, scale, None), w8a16_linear(x, weight, scale[:, None], None)
    )


def test_linears_accept_the_results_of_quantizers() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator) for rows in (5, 7))
    packed, scales = quantize_mxfp4(weight)
    actual = mxfp4_linear(x, packed, scales, None)
    torch.testing.assert_close(actual, x @ dequantize_mxfp4(packed, scales, torch.float32).T)
    actual = mxfp8_linear(*quantize_mxfp8(x), *quantize_mxfp8(weight), None, torch.float32)
    torch.testing.assert_close(actual, x @ weight.T, rtol=0, atol=2.0)
    global_scale = torch.tensor([500.0])
    pairs = [quantize_nvfp4(each, global_scale) for each in (x, weight)]
    plain = [dequantize_nvfp4(*pair, global_scale, torch.float32) for pair in pairs]
    alpha = 1 / global_scale**2
    actual = nvfp4_linear(*pairs[0], *pairs[1], alpha, None, torch.float32)
    torch.testing.assert_close(actual, plain[0] @ plain[1].T)
