"""Weights that were packed are given back bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer import Resolver, Site, place
from interposer_ops.experts import fused_experts
from interposer_ops.linear import linear

pytestmark = pytest.mark.native

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draw tensors of arbitrary bits, including NaN and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    width = WIDTHS[dtype]
    facts = torch.iinfo(width)
    bits = torch.randint(facts.min, facts.max, shape, generator=generator, dtype=torch.int64)
    return bits.to(width).view(dtype)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(WIDTHS[actual.dtype]), expected.view(WIDTHS[actual.dtype]))


def site(dtype: torch.dtype) -> Site:
    return Site(Resolver.at(place()), "layer", dtype)


@settings(max_examples=num_examples(25), deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.booleans(), DTYPES, st.integers(0, 99))
def test_a_packed_weight_is_restored_bit_for_bit(
    outputs: int, inputs: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    sizes = {"in_features": inputs, "out_features": outputs}
    bound = site(dtype).bind_kernel(linear, **sizes, biased=biased)
    assert bound.choice.chosen.name == "linear_native"
    assert bound.restore is not None
    weight = any_bits((outputs, inputs), dtype, seed)
    bias = torch.randn(outputs).to(dtype) if biased else None
    into = {"weight": torch.empty_like(weight)}
    bound.restore(**bound.prepared(weight=weight, bias=bias), into=into)
    assert same_bits(into["weight"], weight)


@settings(max_examples=num_examples(15), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    DTYPES,
)
def test_packed_experts_are_restored_bit_for_bit(
    count: int, hidden: int, inner: int, biased: bool, dtype: torch.dtype
) -> None:
    bound = site(dtype).bind_kernel(
        fused_experts,
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=count,
        top_k=1,
        activation="silu",
        biased=biased,
    )
    if bound.restore is None:
        pytest.skip(f"{bound.choice.chosen.name} packs nothing")
    constants = {
        "gate_up": any_bits((count, 2 * inner, hidden), dtype, 1),
        "gate_up_bias": torch.randn(count, 2 * inner).to(dtype) if biased else None,
        "down": any_bits((count, hidden, inner), dtype, 2),
        "down_bias": torch.randn(count, hidden).to(dtype) if biased else None,
    }
    into = {name: torch.empty_like(constants[name]) for name in ("gate_up", "down")}  # type: ignore[arg-type]
    bound.restore(**bound.prepared(**constants), into=into)
    for name, actual in into.items():
        expected = constants[name]
        assert expected is not None
        assert same_bits(actual, expected)
