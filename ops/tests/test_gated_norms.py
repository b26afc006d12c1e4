from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from interposer_ops.norms import gated_rms_norm
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def by_loops(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, group_size: int, first: bool
) -> torch.Tensor:
    """Return the op on rows ``[T, H]``, group by group."""
    gate_factor = gate / (1 + torch.exp(-gate))
    y = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], group_size):
            group = slice(start, start + group_size)
            norm_input = x[row, group] if first else x[row, group] * gate_factor[row, group]
            unit = functional.rms_norm(norm_input, (group_size,), weight[group], 1e-5)
            y[row, group] = unit * gate_factor[row, group] if first else unit
    return y


@given(
    rows=st.integers(0, 3),
    groups=st.integers(1, 4),
    group_size=st.integers(1, 9),
    first=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_group_has_its_own_statistic(
    rows: int, groups: int, group_size: int, first: bool, seed: int
) -> None:
    width = groups * group_size
    x, gate = (numbers(rows, width, seed=seed + i) for i in range(2))
    weight = numbers(width, seed=seed + 2)
    actual = gated_rms_norm(x, 3 * gate, weight, 1e-5, group_size, first)
    torch.testing.assert_close(actual, by_loops(x, 3 * gate, weight, group_size, first))


@pytest.mark.parametrize("group_size", [8, 16, 48])
def test_gate_before_norm_equals_mamba2(group_size: int) -> None:
    mamba = pytest.importorskip(
        "transformers.models.mamba2.modeling_mamba2", reason="needs transformers"
    )
    norm = mamba.MambaRMSNormGated(48, group_size, eps=1e-5)
    x, gate, weight = (numbers(*shape).float() for shape in ((2, 3, 48), (2, 3, 48), (48,)))
    norm.weight.data.copy_(weight)
    actual = gated_rms_norm(x, gate, weight, 1e-5, group_size, False)
    torch.testing.assert_close(actual, norm(x, gate).detach())


def test_norm_before_gate_equals_gated_delta_net() -> None:
    qwen = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="needs transformers"
    )
    norm = qwen.Qwen3NextRMSNormGated(32, eps=1e-6)
    x, gate, weight = (numbers(*shape).float() for shape in ((5, 4, 32), (5, 4, 32), (32,)))
    norm.weight.data.copy_(weight)
    actual = gated_rms_norm(x, gate, weight, 1e-6, 32, True)
    torch.testing.assert_close(actual, norm(x, gate).detach())


def test_groups_that_do_not_fill_a_row_are_an_error() -> None:
    with pytest.raises(RuntimeError):
        gated_rms_norm(numbers(2, 10), numbers(2, 10), numbers(10), 1e-5, 4, False)


Norm = Callable[..., torch.Tensor]


def one_group(x: torch.Tensor, gate: torch.Tensor, *rest: object) -> torch.Tensor:
    weight, eps, _, first = rest
    return gated_rms_norm(x, gate, weight, eps, x.shape[-1], first)  # type: ignore[arg-type]


def other_order(x: torch.Tensor, gate: torch.Tensor, *rest: object) -> torch.Tensor:
    weight, eps, group_size, first = rest
    return gated_rms_norm(x, gate, weight, eps, group_size, not first)  # type: ignore[arg-type]


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, *rest: object) -> torch.Tensor:
    weight, eps, group_size, first = rest
    wide = torch.sigmoid(gate.float())
    unit = x.float() if first else x.float() * wide
    groups = unit.unflatten(-1, (-1, group_size))
    y = torch.rms_norm(groups, groups.shape[-1:], None, eps).flatten(-2)  # type: ignore[arg-type]
    return (y * weight * (wide if first else 1)).to(x.dtype)  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [one_group, other_order, sigmoid_gate])
def test_cases_detect_a_wrong_norm(wrong: Norm) -> None:
    planned = planned_cases(gated_rms_norm, 0)
    assert any(check_kernel(gated_rms_norm, wrong, plan.build()) for plan in planned)
