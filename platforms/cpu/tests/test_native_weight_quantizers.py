"""Weight quantization by the library equals the references, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from interposer_cpu import native
from interposer_cpu._kernels import weight_quantizers
from interposer_ops import quantizers

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SCALES = (torch.float32, torch.bfloat16, torch.float16)
# O, I, G: whole vectors and rests, one scale, groups of odd sizes.
SHAPES = ((64, 1024, 1024), (33, 96, 32), (17, 90, 15), (5, 130, 2), (20, 384, 128), (2, 24, 24))
# The smallest are subnormal, or have scales that are.
SIZES = (1e-42, 1e-39, 1e-6, 0.03, 1.0, 1e4)

Results = tuple[torch.Tensor, ...]


@pytest.fixture
def forced() -> Iterator[None]:
    yield
    native.force_level(None)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rounded(module: Any, weight: torch.Tensor, group: int) -> Iterator[Results]:
    """Yield the result of every op of a module for a weight."""
    for dtype in SCALES:
        yield module.quantize_weight_int8(weight, group, dtype)
        if weight.shape[1] % 2 == 0:
            yield module.quantize_weight_int4(weight, group, dtype)
    if weight.shape[1] % 2 == 0:
        yield module.quantize_weight_int4_asymmetric(weight, group)


def assert_equal(weight: torch.Tensor, group: int) -> None:
    actual = rounded(weight_quantizers, weight, group)
    for ones, others in zip(actual, rounded(quantizers, weight, group), strict=True):
        for one, other in zip(ones, others, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.landing(4)
@DTYPES
@pytest.mark.parametrize("level", native.levels())
def test_every_level_rounds_as_the_reference_does(
    level: str, dtype: torch.dtype, forced: None
) -> None:
    native.force_level(level)
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs, group in SHAPES:
        for size in SIZES:
            weight = size * torch.randn(outputs, inputs, generator=generator)
            # Groups of zeros, and such on one side of zero: the lowest number is a tie then.
            weight[::3] = 0
            weight[1::5] = weight[1::5].abs()
            weight[2::7] = -weight[2::7].abs()
            assert_equal(weight.clamp(-6e4, 6e4).to(dtype), group)


def test_every_number_of_bfloat16_is_rounded_as_the_reference_does() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    finite = numbers[numbers.isfinite()]
    order = torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))
    assert_equal(finite[order][: len(finite) // 64 * 64].view(-1, 64), 32)
    assert_equal(finite.sort().values[: len(finite) // 64 * 64].view(-1, 64), 32)


@DTYPES
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_nonfinite_weights_give_nonfinite_scales(dtype: torch.dtype, value: float) -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    for place in (0, 31, 40, 95):
        wrong = weight.clone()
        wrong[2, place] = value
        for module in (weight_quantizers, quantizers):
            for _, scale, *_ in rounded(module, wrong, 48):
                expected = torch.ones_like(scale, dtype=torch.bool)
                expected[2, place // 48] = False
                assert torch.equal(scale.isfinite(), expected)


def test_results_do_not_depend_on_the_number_of_threads(threads: Callable[[int], None]) -> None:
    weight = torch.randn(301, 256, generator=torch.Generator().manual_seed(0))
    threads(1)
    alone = list(rounded(weight_quantizers, weight, 32))
    for count in (2, 3):
        threads(count)
        for ones, others in zip(alone, rounded(weight_quantizers, weight, 32), strict=True):
            assert all(map(torch.equal, ones, others))


def test_noncontiguous_weights_are_accepted() -> None:
    wide = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert_equal(wide[:, 7:103], 32)
    assert_equal(wide[:, ::3], 50)
    assert_equal(wide.T[:96], 40)


def test_large_weights_are_quantized_like_their_single_rows() -> None:
    weight = torch.randn(600, 2048, generator=torch.Generator().manual_seed(0))
    whole = quantizers.quantize_weight_int4(weight, 128, torch.float32)
    parts = [quantizers.quantize_weight_int4(rows, 128, torch.float32) for rows in weight.split(37)]
    for actual, each in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(actual, torch.cat(each))
