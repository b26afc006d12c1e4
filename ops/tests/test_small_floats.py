"""Codes of small floats against tables that are written out and numbers that are searched."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.quantizers import (
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    pack_nibbles,
    shared_exponents,
    unpack_nibbles,
)

# OCP Microscaling Formats v1.0, table 5.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DTYPES = (torch.float32, torch.float64)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
def test_all_codes_of_e2m1(dtype: torch.dtype) -> None:
    actual = decode_e2m1(torch.arange(16, dtype=torch.uint8), dtype)
    assert actual.dtype == dtype
    assert actual.tolist() == E2M1 + [-number for number in E2M1]
    assert actual.signbit().tolist() == [False] * 8 + [True] * 8
    assert encode_e2m1(actual).tolist() == list(range(16))


@given(st.floats(-20, 20, allow_subnormal=False))
def test_e2m1_rounds_to_nearest_ties_to_even(number: float) -> None:
    code = int(encode_e2m1(torch.tensor(number, dtype=torch.float64)))
    distances = [abs(abs(number) - candidate) for candidate in E2M1]
    nearest = [index for index, each in enumerate(distances) if each == min(distances)]
    expected = nearest[0] if len(nearest) == 1 else next(n for n in nearest if n % 2 == 0)
    assert code & 7 == expected
    assert bool(code & 8) == (math.copysign(1, number) < 0)


@pytest.mark.parametrize(
    ("tie", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_ties_of_e2m1_go_to_even(tie: float, rounded: float) -> None:
    ties = torch.tensor([tie, -tie])
    assert decode_e2m1(encode_e2m1(ties), torch.float32).tolist() == [rounded, -rounded]


@each_dtype
def test_all_codes_of_e8m0(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    actual = decode_e8m0(codes, dtype)
    assert actual.dtype == dtype
    assert actual[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert math.isnan(actual[255])
    # torch has the format too, if nothing that computes with it.
    theirs = codes.view(torch.float8_e8m0fnu).double()
    torch.testing.assert_close(actual.double(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("largest", [2, 8])
@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_shared_exponents_are_floors(largest: int, peak: float) -> None:
    expected = math.floor(math.log2(peak))
    # The logarithm of the number below a power of two is rounded to that of the power.
    expected -= 2.0**expected > peak
    actual = shared_exponents(torch.tensor(peak, dtype=torch.float32), largest)
    assert int(actual) == max(expected - largest + 127, 0)


def test_shared_exponents_of_powers_of_two_and_their_neighbours() -> None:
    powers = torch.tensor([2.0**exponent for exponent in range(-100, 100)])
    actual = shared_exponents(powers, 8).int()
    assert actual.tolist() == list(range(-100 - 8 + 127, 100 - 8 + 127))
    below = torch.nextafter(powers, torch.zeros(()))
    assert torch.equal(shared_exponents(below, 8).int(), actual - 1)


def test_shared_exponents_saturate_at_the_ends_of_e8m0() -> None:
    peaks = torch.tensor([0.0, 2.0**-126, torch.finfo(torch.float32).max])
    assert shared_exponents(peaks, 8).tolist() == [0, 0, 246]
    assert int(shared_exponents(torch.tensor(2.0**500, dtype=torch.float64), 2)) == 254


def test_every_byte_is_two_codes() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    codes = unpack_nibbles(packed)
    assert codes.view(-1, 2).tolist() == [[byte % 16, byte // 16] for byte in range(256)]
    assert torch.equal(pack_nibbles(codes), packed)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3, 6)])
def test_packing_keeps_outer_dimensions(shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(unpack_nibbles(packed), codes)
