"""The quantized linears against sums that are written out in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from interposer import Case
from interposer.testing import check_kernel
from interposer_quantization.quantized_linear import w8a16_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(dtype, case, id=f"{dtype}-{case.label}")
    for dtype in DTYPES
    for case in w8a16_linear.cases(dtype, 0)
]


def product(case: Case) -> torch.Tensor:
    """Return the result in float64, scaling the sums of groups instead of the weights."""
    x, weight, scale, bias = (case.arguments[name] for name in ("x", "weight", "scale", "bias"))
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float64)
    size = weight.shape[1] // scale.shape[1]
    for group in range(scale.shape[1]):
        inputs = slice(group * size, (group + 1) * size)
        sums = x[..., inputs].double() @ weight[:, inputs].double().T
        total += sums * scale[:, group].double()
    return total if bias is None else total + bias.double()


@pytest.mark.parametrize(("dtype", "case"), CASES)
def test_reference_is_within_its_own_bound(dtype: torch.dtype, case: Case) -> None:
    expected = product(case)
    found = w8a16_linear(**case.arguments)
    assert found.dtype == dtype
    error = (found.double() - expected).abs()
    assert (error <= w8a16_linear.tolerance.bound(expected, dtype, case)).all()


@pytest.mark.parametrize(("dtype", "case"), CASES)
def test_reference_conforms(dtype: torch.dtype, case: Case) -> None:
    assert check_kernel(w8a16_linear, w8a16_linear.reference, case) == []


def test_cases_state_what_a_kernel_can_require() -> None:
    sizes = [case.dims for case in w8a16_linear.cases(torch.float32, 0)]
    for case in w8a16_linear.cases(torch.float32, 0):
        weight, scale = case.arguments["weight"], case.arguments["scale"]
        assert case.dims["num_groups"] == scale.shape[1]
        assert int(case.dims["num_groups"]) * int(case.dims["group_size"]) == weight.shape[1]
        assert (case.dims["out_features"], case.dims["in_features"]) == weight.shape
    assert any(dims["num_groups"] == 1 for dims in sizes)
    assert any(dims["num_groups"] != 1 for dims in sizes)


Linear = Callable[..., torch.Tensor]


def without_bias(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return w8a16_linear.reference(x, weight, scale, None)


def unsigned(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return w8a16_linear.reference(x, weight.view(torch.uint8), scale, bias)


def first_scale(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return w8a16_linear.reference(x, weight, scale[:, :1].contiguous(), bias)


def without_minus_128(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return w8a16_linear.reference(x, weight.clamp(min=-127), scale, bias)


def bfloat16_scales(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return w8a16_linear.reference(x, weight, scale.bfloat16().float(), bias)


@pytest.mark.parametrize(
    "wrong", [without_bias, unsigned, first_scale, without_minus_128, bfloat16_scales]
)
def test_cases_find_a_wrong_kernel(wrong: Linear) -> None:
    def faults() -> Iterator[str]:
        for case in w8a16_linear.cases(torch.float32, 0):
            yield from (fault.check for fault in check_kernel(w8a16_linear, wrong, case))

    assert "value" in set(faults())
