"""Adapted classes that compute an op in another way, or return another memory layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interposer import Case
from interposer_adapt import adapt
from interposer_ops.linear import linear


class MatrixLinear(nn.Linear):
    """A linear in other words."""

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight.T
        return product if self.bias is None else product + self.bias


class ScoringLinear(nn.Linear):
    """A linear that returns more than its product."""

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return scores.softmax(-1), scores


class HalvedLinear(nn.Linear):
    """Something else than a linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class ColumnsLinear(nn.Linear):
    """A linear of rows, which does something else with batches of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.dim() == 2 else x.flip(1))


class BareNorm(nn.Module):
    """A root-mean-square norm that has no weight."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Heads(nn.Module):
    """Normalises hidden states, projects them, and normalises heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 16
        self.before, self.heads, self.proj = BareNorm(), BareNorm(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(self.proj(self.before(x)).unflatten(-1, (-1, self.head_dim)))  # type: ignore[no-any-return]


def places(adapted: Any) -> dict[str, tuple[bool, str]]:
    return {place.name: (place.is_bound, place.reason) for place in adapted.places}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_subclass_with_equal_results_is_bound(bias: bool, dtype: torch.dtype) -> None:
    layer = MatrixLinear(48, 32, bias)
    model = nn.Sequential(layer).to(dtype).eval()
    x = torch.randn(2, 5, 48, dtype=dtype)
    weight = layer.weight.detach().clone()
    largest = float((x.abs().double() @ weight.abs().double().T).max()) + bias
    case = Case("", {}, reduction=48 + bias, magnitude=largest, rounded=largest)
    with torch.no_grad():
        expected = model(x)
        adapted = adapt(model)
        assert places(adapted)["0"][0]
        # Either of the two may be off by as much.
        allowed = 2 * linear.tolerance.bound(expected.double(), dtype, case)
        assert bool(((model(x).double() - expected.double()).abs() <= allowed).all())
        adapted.restore()
        assert torch.equal(model(x), expected)
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ScoringLinear, "the module a tuple"),
        (HalvedLinear, "times as large"),
        (ColumnsLinear, "times as large"),
    ],
)
def test_a_linear_subclass_with_other_results_is_skipped(
    kind: type[nn.Linear], reason: str
) -> None:
    model = nn.Sequential(kind(48, 32)).eval()
    is_bound, skip_reason = places(adapt(model))["0"]
    assert not is_bound
    assert reason in skip_reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unweighted_norm_is_bound_for_the_sizes_of_its_parent(dtype: torch.dtype) -> None:
    model = Heads().to(dtype).eval()
    x = torch.randn(2, 5, 64, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        adapted = adapt(model)
        actual = places(adapted)
        assert (actual["before"][0], actual["heads"][0]) == (True, True)
        torch.testing.assert_close(model(x), expected)
        # An input of an unknown size runs the class's forward.
        odd = torch.randn(3, 11, dtype=dtype)
        assert torch.equal(model.heads(odd), BareNorm()(odd))
        adapted.restore()
        assert torch.equal(model(x), expected)


def test_an_unweighted_norm_without_neighbours_is_skipped() -> None:
    is_bound, reason = places(adapt(nn.Sequential(BareNorm()).eval()))["0"]
    assert not is_bound
    assert reason == "no neighbouring module states the size and dtype of its input"


def test_a_layer_norm_returns_rows_that_can_be_viewed() -> None:
    """torch returns contiguous tensors, and models rely on that."""
    model = nn.Sequential(nn.LayerNorm(64)).eval()
    columns = torch.randn(2, 64, 16).transpose(1, 2)
    with torch.no_grad():
        expected = model(columns)
        adapted = adapt(model)
        assert places(adapted)["0"][0]
        actual = model(columns)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected)
