"""The cache of 4 bits: its bytes, its error budget, and the backend made of standard ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import AttentionSpec, Capability, Config, Resolver, Site, current_registry, place
from interposer.tooling import UINT4
from interposer_ops.attention import GroupedBackend
from interposer_ops.caches import GROUP_SIZE, grouped_bytes, read_groups, round_groups
from interposer_testing import attention_specs, check_attention, check_attention_determinism

ANY = Capability("any")
SPECS = [
    (label, spec)
    for label, spec in attention_specs()
    if spec.cache_dtype == UINT4 and label.startswith(("GQA", "MHA window+"))
]


def site(spec: AttentionSpec) -> Site:
    return Site(Resolver(current_registry(), place().device, Config()), "attention", spec.dtype)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=GROUP_SIZE, max_size=GROUP_SIZE),
    st.floats(-1e4, 1e4, width=32),
)
def test_the_rounding_error_is_at_most_half_a_step(numbers: list[float], shift: float) -> None:
    x = torch.tensor(numbers) + shift
    rows = round_groups(x)
    base, step = rows[GROUP_SIZE // 2 :].view(torch.bfloat16).double()
    actual, exact = read_groups(rows, torch.float32).double(), x.double()
    low, high = exact.min(), exact.max()
    # Quotient and result are rounded in float32 once each.
    slack = 2.0**-22 * (high - low + x.abs().max()) + 1e-38
    assert (actual - exact).abs().max() <= step / 2 + slack
    # Both are rounded to the 8 bits of bfloat16, away from the numbers.
    assert low - 2.0**-7 * low.abs() - 1e-38 <= base <= low
    assert step <= (1 + 2.0**-7) * (high - base) / 15 + 1e-38


def test_numbers_halfway_between_two_values_have_the_largest_error() -> None:
    x = torch.arange(GROUP_SIZE).remainder(16).float()
    x[1] = 0.5
    error = (read_groups(round_groups(x), torch.float32) - x).abs()
    assert error[1] == 0.5
    assert error.sum() == 0.5


def test_a_row_stores_packed_values_then_base_and_step_per_group() -> None:
    x = torch.cat((torch.arange(32) % 16 / 8 - 1, torch.full((32,), -3.0)))
    rows = round_groups(x.view(1, 64).bfloat16())
    assert rows.shape == (1, grouped_bytes(64)) == (1, 40)
    codes = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2
    assert rows[0, :32].tolist() == codes + [0] * 16
    assert rows[0, 32:].view(torch.bfloat16).tolist() == [-1.0, 0.125, -3.0, 0.0]
    assert torch.equal(read_groups(rows, torch.float32), x.view(1, 64))


def test_a_group_with_nan_or_infinity_reads_as_nan() -> None:
    x = torch.zeros(64)
    x[40] = torch.nan
    actual = read_groups(round_groups(x), torch.float32)
    assert torch.equal(actual[:32], torch.zeros(32))
    assert actual[32:].isnan().all()


@pytest.mark.landing(6)
@pytest.mark.parametrize(
    ("label", "spec"), [pytest.param(n, s, id=f"{n} {s.dtype}") for n, s in SPECS]
)
def test_the_backend_matches_the_ops(label: str, spec: AttentionSpec) -> None:
    assert not check_attention(GroupedBackend, spec, site(spec))


@pytest.mark.parametrize("change", [{"alibi": True}, {"prefix_lm": True}, {"shared": True}])
def test_all_score_features_work_with_a_4_bit_cache(change: dict[str, Any]) -> None:
    spec = replace(SPECS[0][1], **change)
    assert not check_attention(GroupedBackend, spec, site(spec))
    assert not check_attention_determinism(GroupedBackend, spec, site(spec))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache_dtype": torch.int8}, "stores 4 bits, requested torch.int8"),
        ({"head_size": 80}, "groups of 32 numbers, the head size is 80"),
        ({"latent": True, "latent_size": 16}, "latent"),
        ({"type": "encoder"}, "decoder attention only"),
    ],
)
def test_refusals_have_reasons(change: dict[str, Any], reason: str) -> None:
    assert reason in GroupedBackend.accepts(replace(SPECS[0][1], **change), ANY).reason
