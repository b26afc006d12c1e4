"""8-bit results of mixed arguments may differ by one number where a value lies at a boundary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from interposer import Case, Tolerance, custom_op
from interposer_testing._checks.call import Call, Subject
from interposer_testing._checks.expectation import Expectation

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
NUM_ELEMENTS = 4096


def no_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    return iter(())


@custom_op("toy_quantizer", cases=no_cases, tolerance=Tolerance(roundings=0))
def toy_quantizer(x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    largest = 127.0 if out_dtype == torch.int8 else torch.finfo(out_dtype).max
    return x.round().clamp(-largest, largest).to(out_dtype)


def has_fault(out_dtype: torch.dtype, num_changed: int, steps: int) -> bool:
    """Tell whether a result is refused in which some codes are ``steps`` numbers too high."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(NUM_ELEMENTS, generator=generator) + 1) * 20
    case = Case("", {"x": x, "out_dtype": out_dtype}, reduction=0, magnitude=0.0)
    given = Subject(toy_quantizer, toy_quantizer.reference).given(case)
    result = toy_quantizer(x, out_dtype)
    codes = result.view(torch.uint8)
    codes[:num_changed] += steps
    expectation, call = Expectation.of(toy_quantizer, case, given), Call(given, result)
    return bool(list(expectation.at_rounding_boundaries(call).departures(call)))


@pytest.mark.parametrize("out_dtype", FORMATS)
def test_few_elements_may_be_the_neighbouring_number(out_dtype: torch.dtype) -> None:
    assert not has_fault(out_dtype, 4, 1)
    assert has_fault(out_dtype, 5, 1)
    assert has_fault(out_dtype, 1, 2)
