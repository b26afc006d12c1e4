from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import CustomOp
from interposer_ops.activations import (
    gelu,
    gelu_and_mul,
    quick_gelu,
    relu2,
    silu_and_mul,
    swiglu_oai_and_mul,
)
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases

SHAPES = [(1, 2), (4, 14), (2, 3, 8), (0, 8)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_silu(g: float) -> float:
    return g * sigmoid(g)


def by_gelu(g: float) -> float:
    return g * (1 + math.erf(g / math.sqrt(2))) / 2


def by_gelu_tanh(g: float) -> float:
    return g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2


def by_quick_gelu(g: float) -> float:
    return g * sigmoid(1.702 * g)


def by_relu2(g: float) -> float:
    return g * g if g > 0 else 0.0


def numbers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64)


def each(activation: Callable[..., float], *tensors: torch.Tensor) -> torch.Tensor:
    """Return a function of numbers, element by element."""
    rows = zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True)
    actual = torch.tensor([activation(*row) for row in rows], dtype=torch.float64)
    return actual.view(tensors[0].shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_activations_equal_their_formulas(shape: tuple[int, ...]) -> None:
    x = numbers(shape)
    torch.testing.assert_close(gelu(x, "none"), each(by_gelu, x))
    torch.testing.assert_close(gelu(x, "tanh"), each(by_gelu_tanh, x))
    torch.testing.assert_close(quick_gelu(x), each(by_quick_gelu, x))
    torch.testing.assert_close(relu2(x), each(by_relu2, x))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_half_gates_the_second(shape: tuple[int, ...]) -> None:
    x = numbers(shape)
    half = shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    for result, activation in (
        (silu_and_mul(x), by_silu),
        (gelu_and_mul(x, "none"), by_gelu),
        (gelu_and_mul(x, "tanh"), by_gelu_tanh),
    ):
        torch.testing.assert_close(result, each(activation, gate) * up, rtol=1e-6, atol=1e-6)


@given(
    rows=st.lists(
        st.tuples(st.floats(-50, 50), st.floats(-50, 50)),
        min_size=1,
        max_size=8,
    ),
    alpha=st.floats(0.5, 2),
    limit=st.floats(0.125, 20),
)
def test_swiglu_of_gpt_oss_interleaves_shifts_and_clamps(
    rows: list[tuple[float, float]], alpha: float, limit: float
) -> None:
    def by_hand(gate: float, up: float) -> float:
        gate, up = min(gate, limit), max(-limit, min(up, limit))
        return (up + 1) * gate * sigmoid(alpha * gate)

    gate, up = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    x = torch.tensor(rows, dtype=torch.float64).flatten()
    torch.testing.assert_close(swiglu_oai_and_mul(x, alpha, limit), each(by_hand, gate, up))


def test_swiglu_of_gpt_oss_equals_its_model() -> None:
    module = pytest.importorskip(
        "transformers.models.gpt_oss.modeling_gpt_oss", reason="needs transformers"
    )

    class Options:
        alpha, limit = 1.702, 7.0

    x = 3 * numbers((4, 32))
    expected = module.GptOssExperts._apply_gate(Options(), x)
    torch.testing.assert_close(swiglu_oai_and_mul(x, 1.702, 7.0), expected)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("quick_gelu", quick_gelu),
        ("relu2", relu2),
        ("gelu", lambda x: gelu(x, "none")),
        ("gelu_pytorch_tanh", lambda x: gelu(x, "tanh")),
        ("gelu_new", lambda x: gelu(x, "tanh")),
    ],
)
def test_activations_equal_the_functions_that_configs_name(
    name: str, activation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    module = pytest.importorskip("transformers.activations", reason="needs transformers")
    x = numbers((3, 40))
    torch.testing.assert_close(activation(x), module.ACT2FN[name](x))


def test_extreme_gates_neither_overflow_nor_leak() -> None:
    x = torch.tensor([[-1e4, 1e4, 2.0, 3.0]])
    assert silu_and_mul(x).tolist() == [[0.0, 3e4]]
    assert gelu_and_mul(x, "none").tolist() == [[0.0, 3e4]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_is_rounded_once(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    for op, options in (
        (silu_and_mul, ()),
        (gelu_and_mul, ("tanh",)),
        (swiglu_oai_and_mul, (1.702, 7.0)),
        (gelu, ("none",)),
        (quick_gelu, ()),
        (relu2, ()),
    ):
        activation: Callable[..., torch.Tensor] = op
        assert torch.equal(activation(x, *options), activation(x.float(), *options).to(dtype))


def exchanged(x: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(torch.cat([*reversed(x.chunk(2, dim=-1))], dim=-1))


def other_form(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return gelu(x, "tanh" if approximate == "none" else "none")


def gelu_for_quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return gelu(x, "none")


def square(x: torch.Tensor) -> torch.Tensor:
    return x.square()


def overflowing_silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    raised = gate.exp()
    return (gate * raised / (1 + raised) * up).to(x.dtype)


def halves(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return swiglu_oai_and_mul(torch.stack((gate, up), dim=-1).flatten(-2), alpha, limit)


def clamped_below(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    gate, up = pairs[..., :1].clamp(-limit, limit), pairs[..., 1:]
    return swiglu_oai_and_mul(torch.cat((gate, up), dim=-1).flatten(-2), alpha, limit)


def silu_for_alpha(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return swiglu_oai_and_mul(x, 1.0, limit)


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        (gelu, other_form),
        (quick_gelu, gelu_for_quick_gelu),
        (relu2, square),
        (silu_and_mul, overflowing_silu),
        (silu_and_mul, exchanged),
        (swiglu_oai_and_mul, halves),
        (swiglu_oai_and_mul, clamped_below),
        (swiglu_oai_and_mul, silu_for_alpha),
    ],
)
def test_cases_detect_a_wrong_activation(
    op: CustomOp[..., Any], wrong: Callable[..., torch.Tensor]
) -> None:
    assert any(check_kernel(op, wrong, planned.build()) for planned in planned_cases(op, 0))
