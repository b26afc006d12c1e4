"""The cache of int8 against arithmetic in whole numbers and fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.caches import gather_cache_int8, reshape_and_cache_int8
from interposer_testing.cases import planned_cases


def nearest(x: Fraction) -> int:
    """Round to the nearest whole number, of two to the even one, within the range of int8."""
    return max(-128, min(127, round(x)))


def stored(key: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the keys that are stored in the slots of the tokens, in order."""
    shape = (len(key), 1, *key.shape[1:])
    keys, values = (torch.zeros(shape, dtype=torch.int8) for _ in range(2))
    slots = torch.arange(len(key))
    reshape_and_cache_int8(key, -key, keys, values, slots, scale, 2 * scale)
    halved = [nearest(-Fraction(x) / 2) for x in (key / scale[:, None]).flatten().tolist()]
    assert values.flatten().tolist() == halved
    return keys[:, 0]


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20))
def test_quotients_are_rounded_to_the_nearest_integer(numbers: list[float]) -> None:
    actual = stored(torch.tensor(numbers).view(-1, 1, 1), torch.ones(1))
    assert actual.flatten().tolist() == [nearest(Fraction(x)) for x in numbers]


def test_ties_go_to_even_and_both_ends_saturate() -> None:
    ties = torch.arange(-128, 127).double() + 0.5
    actual = stored(ties.float().view(-1, 1, 1), torch.ones(1)).flatten()
    assert (actual % 2 == 0).all()
    assert ((actual - ties).abs() == 0.5).all()
    far = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 127.5, -128.5]).view(-1, 1, 1)
    assert stored(far[:2], torch.ones(1)).flatten().tolist() == [127, -128]
    slots, scale = torch.arange(6), torch.ones(1)
    keys, values = (torch.zeros(6, 1, 1, 1, dtype=torch.int8) for _ in range(2))
    reshape_and_cache_int8(far, far, keys, values, slots, scale, scale)
    assert keys.flatten().tolist() == [127, -128, 127, -128, 127, -128]
    assert torch.equal(keys, values)


def test_per_head_scales_apply_to_writing_and_reading() -> None:
    key = torch.tensor([[[8.0, 4.0], [8.0, 4.0]]])
    scale = torch.tensor([2.0, 4.0])
    assert stored(key, scale).tolist() == [[[4, 2], [2, 1]]]
    cache = torch.tensor([[[[4, 2], [2, 1]]]], dtype=torch.int8)
    zero, one = torch.tensor([0]), torch.tensor([1])
    actual = gather_cache_int8(cache, zero[:, None], one, zero, scale, 2, torch.bfloat16)
    assert actual.dtype == torch.bfloat16
    assert actual.tolist() == [*key.tolist(), [[0.0, 0.0], [0.0, 0.0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cases_do_not_depend_on_how_quotients_are_computed(dtype: torch.dtype) -> None:
    """A quotient that is off by as much as float32 can be, stores the same."""
    checked = 0
    for planned in planned_cases(reshape_and_cache_int8, 0, quick=True):
        case = planned.build()
        key, scale = case.arguments["key"].double(), case.arguments["key_scale"].double()
        if case.arguments["key"].dtype != dtype or "infinities" in case.label:
            continue
        exact = key / scale[:, None]
        if "ties" in case.label:
            assert (exact % 1 == 0.5).all()
        else:
            low, high = ((exact * off).round().clamp(-128, 127) for off in (0.99999, 1.00001))
            assert torch.equal(low, high)
        checked += key.numel()
    assert checked > 1000
