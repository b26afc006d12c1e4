"""The search for NaN and infinity, native and by torch, against the definition by ``isfinite``."""

from __future__ import annotations

import pytest
import torch
from core.tests.test_platform import Bare

from interposer import Platform
from interposer_cpu._finite_numbers import are_finite, copy_finite
from interposer_cpu._platform import CPUPlatform

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
]
PLATFORMS = [CPUPlatform(), Bare()]
# A few numbers, and so many that several threads search.
SIZES = (1, 7, 33, 300_001)
VALUES = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.landing(6)
@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_nonfinite_number_at_any_position_is_found(
    platform: Platform, dtype: torch.dtype
) -> None:
    for size in SIZES:
        # All numbers that there are, those without a fraction and the largest included.
        numbers = torch.linspace(-1, 1, size, dtype=torch.float64)
        numbers[-1] = torch.finfo(dtype).max
        for at in {0, size // 2, size - 1}:
            for value in VALUES:
                wrong = numbers.clone()
                wrong[at] = value
                check(platform, wrong.float().to(dtype))
        check(platform, numbers.to(dtype))


def check(platform: Platform, tensor: torch.Tensor) -> None:
    """Compare both searches of a platform with the definition."""
    expected = bool(tensor.float().isfinite().all()) or tensor.dtype == torch.float64
    if tensor.dtype == torch.float64:
        expected = bool(tensor.isfinite().all())
    copy = torch.empty_like(tensor)
    assert platform.all_finite(tensor) == expected
    assert platform.copy_finite(copy, tensor) == expected
    assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))


def test_integers_views_and_other_dtypes_are_accepted() -> None:
    platform = CPUPlatform()
    assert platform.all_finite(torch.full((3,), 2**31 - 1, dtype=torch.int32))
    assert platform.all_finite(torch.empty(0))
    numbers = torch.ones(4, 6)
    numbers[1, 5] = float("nan")
    assert platform.all_finite(numbers[:, :5])
    assert not platform.all_finite(numbers.mT)
    target = torch.zeros(6, 4)
    assert not platform.copy_finite(target.mT, numbers)
    assert target[5, 1].isnan()
    wide = torch.zeros(4, 6, dtype=torch.float64)
    assert not platform.copy_finite(wide, numbers)
    assert wide[1, 5].isnan()
    # A dtype that is too small makes it infinite.
    assert not platform.copy_finite(torch.empty(1, dtype=torch.float16), torch.tensor([1e6]))


@pytest.mark.parametrize("count", [3, 300_001])
def test_the_compiled_library_checks_every_supported_dtype(count: int) -> None:
    for dtype in DTYPES[:-1]:
        tensor = torch.ones(count).to(dtype)
        assert are_finite(tensor) is True
        assert copy_finite(torch.empty_like(tensor), tensor) is True
    assert are_finite(torch.ones(3).to(DTYPES[-1])) is None
