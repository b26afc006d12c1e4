"""The quantizers against definitions that are written another way, and their traps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import CustomOp
from interposer_ops.quantized_linear import tile_scales
from interposer_ops.quantizers import (
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_fp8_blocks,
    quantize_fp8_per_token,
    quantize_fp8_static,
    quantize_int8_per_token,
    quantize_int8_per_token_asymmetric,
    quantize_int8_static,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_weight_int8,
)
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
each_fp8 = pytest.mark.parametrize("out_dtype", FP8, ids=str)
OPS: list[CustomOp[..., Any]] = [
    quantize_fp8_static,
    quantize_fp8_per_token,
    quantize_fp8_blocks,
    quantize_int8_static,
    quantize_int8_per_token,
    quantize_int8_per_token_asymmetric,
    quantize_mxfp8,
    quantize_mxfp4,
    quantize_nvfp4,
    dequantize_mxfp4,
    dequantize_nvfp4,
    tile_scales,
]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-6, 6, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), spread)


def numbers_of(dtype: torch.dtype) -> list[float]:
    """Return the finite numbers of an 8-bit float, in order."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return sorted(set(codes[codes.isfinite()].tolist()))


def nearest(value: float, numbers: list[float]) -> set[float]:
    """Return the number or the two numbers that are nearest."""
    closest = min(abs(value - number) for number in numbers)
    return {number for number in numbers if abs(value - number) == closest}


@pytest.mark.landing(2)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_references_are_within_their_own_bounds(op: CustomOp[..., Any]) -> None:
    for plan in planned_cases(op, 3, quick=True):
        assert check_kernel(op, op.reference, plan.build()) == [], plan.label


@each_fp8
def test_fp8_is_the_nearest_number(out_dtype: torch.dtype) -> None:
    x, scale = rows(3, 40), torch.tensor([0.37])
    actual = quantize_fp8_static(x, scale, out_dtype)
    assert actual.dtype == out_dtype
    numbers = numbers_of(out_dtype)
    quotients = (x.double() / scale.double()).flatten().tolist()
    for quotient, number in zip(quotients, actual.double().flatten().tolist(), strict=True):
        assert number in nearest(quotient, numbers)


@each_fp8
def test_fp8_ties_go_to_even_codes(out_dtype: torch.dtype) -> None:
    codes = torch.arange(127, dtype=torch.uint8)
    numbers = codes.view(out_dtype).double()
    between = ((numbers[1:] + numbers[:-1]) / 2).float()
    finite = between.isfinite()
    actual = quantize_fp8_static(between[finite][None], torch.ones(1), out_dtype)
    expected = torch.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])[finite]
    assert actual.view(torch.uint8)[0].tolist() == expected.tolist()


@each_fp8
def test_fp8_saturates(out_dtype: torch.dtype) -> None:
    limit = torch.finfo(out_dtype).max
    x = torch.tensor([[torch.inf, -torch.inf, 1.5 * limit, -3 * limit]])
    actual = quantize_fp8_static(x, torch.ones(1), out_dtype)
    assert actual.double().tolist() == [[limit, -limit, limit, -limit]]


@each_fp8
def test_dynamic_scales_map_the_peak_to_the_largest_number(out_dtype: torch.dtype) -> None:
    x, limit = rows(5, 64), torch.finfo(out_dtype).max
    q, scale = quantize_fp8_per_token(x, out_dtype, None)
    assert q.double().abs().amax(-1).tolist() == [limit] * 5
    torch.testing.assert_close(scale, x.abs().amax(-1, keepdim=True) / limit)
    *_, below, largest = numbers_of(out_dtype)
    assert ((q.double() * scale - x).abs() <= 0.5001 * (largest - below) * scale).all()


def test_rows_of_zeros_have_a_scale_of_one() -> None:
    zeros = torch.zeros(2, 64)
    for q, scale in (
        quantize_fp8_per_token(zeros, torch.float8_e4m3fn, None),
        quantize_fp8_blocks(zeros, 32, torch.float8_e4m3fn, True),
        quantize_int8_per_token(zeros),
    ):
        assert not q.double().any()
        assert (scale == 1).all()
    q, scale, zero_point = quantize_int8_per_token_asymmetric(zeros)
    assert (scale == 1).all()
    assert (q.int() == zero_point).all()


def test_limited_scales_saturate_outliers() -> None:
    x = torch.tensor([[448.0, 1.0], [4480.0, 3.0]])
    q, scale = quantize_fp8_per_token(x, torch.float8_e4m3fn, 2.0)
    assert scale.tolist() == [[1.0], [2.0]]
    assert q.double().tolist() == [[448.0, 1.0], [448.0, 1.5]]


@pytest.mark.parametrize("width", [128, 300, 70])
@pytest.mark.parametrize("rounded_up", [False, True])
def test_each_block_is_quantized_like_a_row(width: int, rounded_up: bool) -> None:
    x = rows(3, width)
    q, scales = quantize_fp8_blocks(x, 128, torch.float8_e4m3fn, rounded_up)
    assert scales.shape == (3, math.ceil(width / 128))
    for number in range(scales.shape[1]):
        block = slice(128 * number, 128 * number + 128)
        part, fitting = quantize_fp8_per_token(x[:, block], torch.float8_e4m3fn, None)
        if rounded_up:
            fitting = torch.tensor([[2.0 ** math.ceil(math.log2(s))] for s in fitting])
            part = (x[:, block] / fitting).to(torch.float8_e4m3fn)
        assert torch.equal(scales[:, number], fitting[:, 0])
        assert torch.equal(q[:, block].float(), part.float())


def test_power_of_two_scales_are_not_rounded_up() -> None:
    x = torch.tensor([[448.0, 1.0], [896.0, 1.0], [450.0, 1.0]])
    _, scales = quantize_fp8_blocks(x, 2, torch.float8_e4m3fn, True)
    assert scales.flatten().tolist() == [1.0, 2.0, 2.0]


@given(st.integers(-128, 127), st.floats(-300, 300, width=32))
def test_int8_adds_the_zero_point_after_rounding(zero_point: int, value: float) -> None:
    x, scale = torch.tensor([[value]]), torch.tensor([0.5])
    actual = quantize_int8_static(x, scale, torch.tensor([zero_point], dtype=torch.int32))
    expected = max(-128, min(127, round(value / 0.5) + zero_point))
    assert actual.tolist() == [[expected]]


def test_int8_ties_do_not_depend_on_the_zero_point() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5]])
    odd = torch.tensor([3], dtype=torch.int32)
    assert quantize_int8_static(x, torch.ones(1), None).tolist() == [[0, 2, 2, 0, -2]]
    assert quantize_int8_static(x, torch.ones(1), odd).tolist() == [[3, 5, 5, 3, 1]]


@given(st.integers(0, 1000))
def test_int8_per_token_is_within_half_a_step(seed: int) -> None:
    x = rows(4, 33, seed=seed)
    q, scale = quantize_int8_per_token(x)
    assert q.int().abs().amax(-1).tolist() == [127] * 4
    assert ((q * scale.double() - x).abs() <= 0.5001 * scale).all()
    q, scale, zero_point = quantize_int8_per_token_asymmetric(x)
    assert zero_point.dtype == torch.int32
    assert ((zero_point >= -128) & (zero_point <= 127)).all()
    # Beside its own rounding, that of the zero point may push the end of the range out of it.
    assert (((q.int() - zero_point) * scale.double() - x).abs() <= 1.0001 * scale).all()


@pytest.mark.parametrize(("sign", "expected"), [(1, -128), (-1, 127)])
def test_one_sided_rows_use_all_codes(sign: int, expected: int) -> None:
    x = rows(3, 50).abs() * sign
    q, _, zero_point = quantize_int8_per_token_asymmetric(x)
    assert zero_point.flatten().tolist() == [expected] * 3
    assert (q.amax(-1).int() - q.amin(-1).int() > 200).all()
    assert (q == -expected - 1).any(-1).all()


def mx_blocks(x: torch.Tensor, largest: int, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the clamped quotients and the exponents of blocks, with numpy."""
    blocks = x.double().numpy().reshape(*x.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - largest
    return np.clip(blocks / 2.0 ** exponents[..., None], -limit, limit), exponents + 127


def test_mxfp8_against_numpy() -> None:
    x = rows(7, 96)
    q, scales = quantize_mxfp8(x)
    quotients, exponents = mx_blocks(x, 8, 448.0)
    assert scales.tolist() == exponents.tolist()
    expected = torch.from_numpy(quotients).reshape(7, 96).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))


def test_mxfp4_against_numpy() -> None:
    x = rows(7, 96)
    packed, scales = quantize_mxfp4(x)
    quotients, exponents = mx_blocks(x, 2, 6.0)
    assert scales.tolist() == exponents.tolist()
    grid = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    magnitudes = np.abs(quotients)[..., None]
    expected = np.sign(quotients) * grid[np.abs(magnitudes - grid).argmin(-1)]
    actual = dequantize_mxfp4(packed, scales, torch.float64)
    powers = np.repeat(2.0 ** (exponents - 127), 32, -1)
    assert actual.tolist() == (expected.reshape(7, 96) * powers).tolist()


def test_the_first_element_is_in_the_low_nibble() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 6.0, -1.0
    packed, scales = quantize_mxfp4(x)
    assert scales.tolist() == [[127]]
    assert packed[0, 0].item() == 0xA7
    packed, block_scales = quantize_nvfp4(x, torch.ones(1))
    assert block_scales.float().tolist() == [[1.0, 0.0]]
    assert packed[0].tolist() == [0xA7] + [0] * 15


def test_a_scale_of_nan_spoils_its_block_alone() -> None:
    packed = torch.full((1, 32), 0x10, dtype=torch.uint8)
    scales = torch.tensor([[255, 127]], dtype=torch.uint8)
    actual = dequantize_mxfp4(packed, scales, torch.bfloat16)
    assert actual[0, :32].isnan().all()
    assert actual[0, 32:].tolist() == [0.0, 0.5] * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_round_trip_is_within_a_step(dtype: torch.dtype) -> None:
    x = rows(9, 64).to(dtype)
    global_scale = (448 * 6 / x.float().abs().max()).view(1)
    packed, scales = quantize_nvfp4(x, global_scale)
    assert packed.shape == (9, 32)
    assert float(scales.float().max()) == 448
    actual = dequantize_nvfp4(packed, scales, global_scale, torch.float32)
    peaks = x.float().unflatten(-1, (4, 16)).abs().amax(-1)
    # Half of the widest step is a sixth of the peak; a block scale is wrong by 1 / 16 at most,
    # or by half of the smallest subnormal.
    allowed = peaks * (1 / 6 + 1 / 16 + 1e-3) + 6 * 2.0**-10 / global_scale
    assert ((actual - x.float()).abs() <= allowed.repeat_interleave(16, -1)).all()


def test_blocks_below_the_smallest_scale_are_zeros() -> None:
    x = torch.full((1, 16), 1e-4)
    x[0, 1] = -1e-4
    packed, scales = quantize_nvfp4(x, torch.ones(1))
    assert scales.float().tolist() == [[0.0]]
    assert packed.tolist() == [[0x80] + [0] * 7]


@pytest.mark.parametrize("shape", [(1, 1), (37, 5), (129, 8), (256, 12), (0, 3)])
@pytest.mark.parametrize("rows_per_tile", [128, 8])
def test_tiled_scales_have_the_documented_offsets(
    shape: tuple[int, int], rows_per_tile: int
) -> None:
    scales = torch.randint(1, 255, shape, dtype=torch.uint8)
    tiles = tile_scales(scales, rows_per_tile)
    num_columns = math.ceil(shape[1] / 4)
    assert tiles.shape == (math.ceil(shape[0] / rows_per_tile), num_columns, 4 * rows_per_tile)
    expected = torch.zeros(tiles.numel(), dtype=torch.uint8)
    for row in range(shape[0]):
        for column in range(shape[1]):
            tile = row // rows_per_tile * num_columns + column // 4
            outer = row % rows_per_tile
            inside = outer % 32 * 16 + outer // 32 * 4 if rows_per_tile == 128 else outer * 4
            expected[tile * 4 * rows_per_tile + inside + column % 4] = scales[row, column]
    assert torch.equal(tiles.flatten(), expected)


def test_tiles_of_floats_equal_tiles_of_their_bytes() -> None:
    codes = torch.randint(0, 127, (40, 6), dtype=torch.uint8)
    actual = tile_scales(codes.view(torch.float8_e4m3fn), 128)
    assert torch.equal(actual.view(torch.uint8), tile_scales(codes, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_of_weights_round_like_a_conversion_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(1, 0x7F800000, (1 << 16, 1), generator=generator, dtype=torch.int32)
    # Halves between two of the dtype's, its largest and its smallest ones are there.
    exact = torch.arange(1, 0x7F80, dtype=torch.int32)[:, None] << 16 | 0x8000
    weight = torch.cat([bits, exact, exact + 1, exact - 1]).view(torch.float32)
    _, scale = quantize_weight_int8(weight, 1, dtype)
    facts = torch.finfo(dtype)
    expected = (weight * 2 / 255).clamp(min=facts.tiny * facts.eps).to(dtype).float()
    assert torch.equal(scale, expected)
    assert expected.isinf().any()
