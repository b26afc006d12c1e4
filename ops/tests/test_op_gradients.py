"""The gradients that ops declare: right in float64, and refused if a kernel's are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from interposer import Case, CustomOp
from interposer.records import OpEntry, load_target
from interposer_ops._records import read_records
from interposer_ops.activations import silu_and_mul
from interposer_ops.norms import rms_norm
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases

OPS: dict[str, CustomOp[..., Any]] = {
    record.name: load_target(record.target)
    for record in read_records()
    if isinstance(record, OpEntry) and "differentiable" in record.properties
}
# More elements would take seconds, as each is changed in turn.
NUM_ELEMENTS = range(12, 300)


def cases(op: CustomOp[..., Any], dtype: torch.dtype, every: int = 1) -> list[Case]:
    plans = [plan for plan in planned_cases(op, 0, quick=True) if plan.dtype == dtype]
    return [plan.build() for plan in plans[::every]]


def size(case: Case) -> int:
    return sum(v.numel() for v in case.arguments.values() if isinstance(v, Tensor))


def small_cases(op: CustomOp[..., Any]) -> list[Case]:
    """Return a few cases without special values, and without ties, where a step is no slope."""
    return [
        case
        for case in sorted(cases(op, torch.float32), key=size)
        if size(case) in NUM_ELEMENTS
        and "tied" not in case.label
        and all(v.isfinite().all() for v in case.arguments.values() if isinstance(v, Tensor))
    ][:3]


def test_ten_ops_declare_their_gradients() -> None:
    assert set(OPS) == {
        *("gelu", "silu_and_mul", "gelu_and_mul", "rms_norm", "layer_norm", "l2_norm"),
        *("linear", "batched_linear", "rotary_embedding", "topk_softmax"),
    }


@pytest.mark.parametrize("name", OPS)
def test_autograd_of_the_reference_is_the_slope_of_the_reference(name: str) -> None:
    op = OPS[name]
    for case in small_cases(op):
        arguments = {
            n: v.double().contiguous() if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in case.arguments.items()
        }
        names = [n for n in op.differentiable if arguments[n] is not None]

        def outputs(
            *values: Tensor,
            op: CustomOp[..., Any] = op,
            arguments: dict[str, Any] = arguments,
            names: list[str] = names,
        ) -> tuple[Tensor, ...]:
            result = op(**{**arguments, **dict(zip(names, values, strict=True))})
            results = result if isinstance(result, tuple) else (result,)
            return tuple(r for r in results if r.is_floating_point())

        assert names
        inputs = [arguments[n].requires_grad_() for n in names]
        assert torch.autograd.gradcheck(outputs, inputs, eps=1e-6, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_the_reference_is_within_the_bound_of_its_gradients(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for case in cases(op, dtype, every=4):
        assert check_kernel(op, op.reference, case, gradients=True) == [], case.label


class OwnSiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        context.save_for_backward(x)
        return (functional.silu(gate) * up).to(x.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        gate, up = x.float().chunk(2, dim=-1)
        gradient, opening = gradient.float(), gate.sigmoid()
        slope = opening * (1 + gate * (1 - opening))
        return torch.cat((gradient * up * slope, gradient * gate * opening), dim=-1).to(x.dtype)


def rounded_silu_and_mul(x: Tensor) -> Tensor:
    """Round each step to the storage dtype, as torch does without a compiler."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rounded_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Round the normalised row to the storage dtype, as transformers does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        (silu_and_mul, OwnSiluAndMul.apply),
        (silu_and_mul, rounded_silu_and_mul),
        (rms_norm, rounded_rms_norm),
    ],
)
def test_kernels_with_the_roundings_of_the_op_are_within_the_bound(
    op: CustomOp[..., Any], kernel: Callable[..., Any], dtype: torch.dtype
) -> None:
    for case in cases(op, dtype, every=3):
        assert check_kernel(op, kernel, case, gradients=True) == [], case.label


def statistics_without_gradient(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale.detach() * weight).to(x.dtype)


def fixed_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result: Tensor = rms_norm(x, weight.detach(), eps)
    return result


def sums_in_the_storage_dtype(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result: Tensor = rms_norm(x, weight, eps)
    # The values of the forward pass are right, and the gradient is that of bfloat16.
    narrow = rms_norm(x.bfloat16(), weight.bfloat16(), eps).to(x.dtype)
    return narrow + (result - narrow).detach()


@pytest.mark.parametrize(
    ("kernel", "where"),
    [
        (statistics_without_gradient, {"gradient of 'x'"}),
        (fixed_weight, {"gradient of 'weight'"}),
        (sums_in_the_storage_dtype, {"gradient of 'x'", "gradient of 'weight'"}),
    ],
)
def test_a_wrong_gradient_is_a_fault_of_its_argument(
    kernel: Callable[..., Any], where: set[str]
) -> None:
    case = next(case for case in cases(rms_norm, torch.float32) if case.label == "many rows")
    assert check_kernel(rms_norm, kernel, case) == []
    faults = check_kernel(rms_norm, kernel, case, gradients=True)
    assert {(fault.check, fault.where) for fault in faults} == {("value", name) for name in where}
