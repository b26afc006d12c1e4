"""The cache of 8 bits against the table of all its numbers."""

from __future__ import annotations

import bisect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.caches import gather_cache_fp8, reshape_and_cache_fp8, write_latent_cache
from interposer_testing.cases import planned_cases

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def grid(dtype: torch.dtype) -> list[float]:
    """Return the finite numbers from 0 on: number n has the bits of n."""
    numbers = torch.arange(127, dtype=torch.uint8).view(dtype).double()
    return [float(number) for number in numbers if number.isfinite()]


def nearest(x: float, numbers: list[float]) -> float:
    """Round to the nearest number, of two to the one of even bits."""
    size = min(abs(x), numbers[-1])
    above = bisect.bisect_left(numbers, size)
    below = max(above - 1, 0)
    up, down = numbers[above] - size, size - numbers[below]
    is_above = above % 2 == 0 if up == down else up < down
    chosen = above if is_above else below
    return numbers[chosen] if x >= 0 else -numbers[chosen]


def stored(key: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the keys that are stored in the slots of the tokens, in order."""
    shape = (len(key), 1, *key.shape[1:])
    keys, values = (torch.zeros(shape, dtype=dtype) for _ in range(2))
    slots = torch.arange(len(key))
    reshape_and_cache_fp8(key, -key, keys, values, slots, scale, 2 * scale, dtype)
    halved = (-key.double() / (2 * scale.double()[:, None])).float()
    assert torch.equal(values[:, 0].float(), rounded(halved, dtype))
    return keys[:, 0].float()


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    numbers = grid(dtype)
    return torch.tensor([nearest(v, numbers) for v in x.flatten().tolist()]).view(x.shape)


@each_dtype
@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20))
def test_numbers_are_rounded_to_the_nearest_of_the_format(
    dtype: torch.dtype, numbers: list[float]
) -> None:
    key = torch.tensor(numbers).view(-1, 1, 1)
    assert torch.equal(stored(key, torch.ones(1), dtype), rounded(key, dtype))


@each_dtype
def test_every_tie_goes_to_even(dtype: torch.dtype) -> None:
    numbers = torch.tensor(grid(dtype))
    key = ((numbers[1:] + numbers[:-1]) / 2).view(-1, 1, 1)
    actual = stored(key, torch.ones(1), dtype)
    assert torch.equal(actual, rounded(key, dtype))
    assert (actual.flatten() == numbers[::2, None]).any(0).all()


@each_dtype
def test_too_large_numbers_saturate(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    key = torch.tensor([1e30, -1e30, 1.2 * largest, largest]).view(-1, 1, 1)
    actual = stored(key, torch.ones(1), dtype).flatten().tolist()
    assert actual == [largest, -largest, largest, largest]


@each_dtype
def test_per_head_scales_apply_to_writing_and_reading(dtype: torch.dtype) -> None:
    key = torch.tensor([[[8.0, 4.0], [8.0, 4.0]]])
    scale = torch.tensor([2.0, 4.0])
    assert stored(key, scale, dtype).tolist() == [[[4.0, 2.0], [2.0, 1.0]]]
    cache = torch.tensor([[[[4.0, 2.0], [2.0, 1.0]]]]).to(dtype)
    zero, one = torch.tensor([0]), torch.tensor([1])
    actual = gather_cache_fp8(cache, zero[:, None], one, zero, scale, 2, torch.bfloat16)
    assert actual.dtype == torch.bfloat16
    assert actual.tolist() == [*key.tolist(), [[0.0, 0.0], [0.0, 0.0]]]


def test_cases_do_not_depend_on_how_quotients_are_computed() -> None:
    """A quotient that is off by as much as float32 can be, stores the same."""
    checked = 0
    for planned in planned_cases(reshape_and_cache_fp8, 0, quick=True):
        case = planned.build()
        key, scale = case.arguments["key"].double(), case.arguments["key_scale"].double()
        dtype = case.arguments["cache_dtype"]
        exact = (key / scale[:, None]).float()
        if "ties" in case.label:
            assert torch.equal(exact.double(), key / scale[:, None])
            continue
        largest = torch.finfo(dtype).max
        low, high = ((exact * off).clamp(-largest, largest).to(dtype) for off in (0.9999, 1.0001))
        assert torch.equal(low.float(), high.float())
        checked += key.numel()
    assert checked > 1000


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5))
def test_a_latent_row_and_its_rotated_key_share_a_slot(
    latent_size: int, rotary_size: int, page_size: int, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    row = torch.randn(num_tokens, latent_size + rotary_size, generator=generator)
    cache = torch.zeros(5, page_size, latent_size + rotary_size)
    slots = torch.randperm(5 * page_size, generator=generator)[:num_tokens]
    latent, rope_key = row[: len(slots)].split((latent_size, rotary_size), dim=1)
    write_latent_cache(latent, rope_key, cache, slots)
    flat = cache.flatten(0, 1)
    assert torch.equal(flat[slots], row[: len(slots)])
    assert int(flat.any(-1).sum()) == len(slots)
