"""Attention over caches that blocks of many rows convert first, and over those of 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer import AttentionBackend, AttentionSpec, Config, Resolver, Site, current_registry
from interposer.tooling import UINT4
from interposer_cpu import native
from interposer_cpu._kernels.attention import NativeBackend
from interposer_cpu._kernels.rows_attention import NativeRowsBackend
from interposer_cpu._platform import CPUPlatform
from interposer_ops.attention import GroupedBackend
from interposer_ops.caches import read_groups, round_groups
from interposer_testing import attention_specs, check_attention
from interposer_testing.workload import paged_batch

pytestmark = pytest.mark.skipif(
    bool(native.why_absent()), reason=f"needs native kernels: {native.why_absent()}"
)

DEVICE = CPUPlatform().devices()[0]
PAGE = 16


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    native.force_level(None)


def spec(**changes: Any) -> AttentionSpec:
    facts = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.float32,
        "cache_dtype": UINT4,
        "page_size": PAGE,
        "scale": 0.5,
        **changes,
    }
    return AttentionSpec(**facts)


def built(kind: type[AttentionBackend], wanted: AttentionSpec) -> AttentionBackend:
    return kind(wanted, Site(Resolver(current_registry(), DEVICE, Config()), "", wanted.dtype))


def outputs(
    kind: type[AttentionBackend],
    wanted: AttentionSpec,
    counts: list[int],
    tensors: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Return what a sequence gives whose tokens come in steps of so many."""
    backend, length = built(kind, wanted), sum(counts)
    pages = torch.arange(-(-length // PAGE)).flip(0)
    (cache,) = backend.kv_layout().allocate(1, len(pages), "cpu")
    cache.view(torch.uint8).fill_(0xFF)
    scales = torch.full((2, 1), 1 / 40).unbind()
    found, start = [], 0
    for count in counts:
        plan = backend.plan(paged_batch([pages], [start], [count], PAGE))
        query, key, value = (x[start : start + count] for x in tensors)
        if wanted.is_quantized:
            prepared = backend.prepare_scales(*scales)
            found.append(backend.forward_quantized(query, key, value, cache, plan, prepared))
        else:
            found.append(backend.forward(query, key, value, cache, plan))
        start += count
    return torch.cat(found)


def drawn(wanted: AttentionSpec, length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    heads = (wanted.num_heads, wanted.num_kv_heads, wanted.num_kv_heads)
    shapes = ((length, count, wanted.head_size) for count in heads)
    return tuple(torch.randn(s, generator=generator).to(wanted.dtype) for s in shapes)


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize(
    ("label", "wanted"),
    [
        pytest.param(label, wanted, id=f"{label} {wanted.dtype}")
        for label, wanted in attention_specs(page_sizes=(PAGE,))
        if wanted.cache_dtype == UINT4 and label.startswith(("GQA", "MQA window"))
    ],
)
def test_every_level_does_what_the_ops_say(level: str, label: str, wanted: AttentionSpec) -> None:
    native.force_level(level)
    place = Site(Resolver(current_registry(), DEVICE, Config()), "attention", wanted.dtype)
    assert not check_attention(NativeBackend, wanted, place)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    numbers=st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64),
    level=st.sampled_from(native.levels() or ("",)),
)
def test_the_only_token_gives_the_value_as_the_reference_rounds_it(
    numbers: list[float], level: str
) -> None:
    native.force_level(level)
    wanted = spec(num_heads=1, num_kv_heads=1)
    value = torch.tensor(numbers).view(1, 1, 64)
    query = torch.zeros(1, 1, 64)
    found = outputs(NativeBackend, wanted, [1], (query, query, value))
    expected = read_groups(round_groups(value), torch.float32)
    # Base and step times code are added in either order of rounding.
    torch.testing.assert_close(found, expected, rtol=2.0**-22, atol=1e-6 * float(value.abs().max()))


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("change", [{}, {"window_tokens": 70}, {"softcap": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_gives_what_the_portable_backend_gives(
    level: str, change: dict[str, Any], dtype: torch.dtype
) -> None:
    native.force_level(level)
    wanted = spec(dtype=dtype, **change)
    tensors, counts = drawn(wanted, 643), [1, 30, 500, 1, 7, 103, 1]
    found, expected = (
        outputs(kind, wanted, counts, tensors).double() for kind in (NativeBackend, GroupedBackend)
    )
    # In 16 bits either rounds numbers of up to 4, and weights or values once more.
    error = 4 * 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 2e-5
    torch.testing.assert_close(found, expected, rtol=0, atol=error)


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, UINT4])
def test_blocks_of_many_rows_give_what_single_tokens_give(
    level: str, cache_dtype: torch.dtype
) -> None:
    native.force_level(level)
    wanted = spec(dtype=torch.bfloat16, cache_dtype=cache_dtype, num_heads=6)
    tensors = drawn(wanted, 90)
    whole, single = (
        outputs(NativeBackend, wanted, counts, tensors).double() for counts in ([90], [1] * 90)
    )
    # Weights, or values of 4 bits and of up to 4, are rounded to bfloat16 in one of them.
    torch.testing.assert_close(whole, single, rtol=0, atol=3 * 4 * 2.0**-8)
    assert (whole - single).abs().mean() < 2.0**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    before, found = torch.get_num_threads(), []
    wanted = spec(dtype=dtype)
    tensors = drawn(wanted, 1300)
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(outputs(NativeBackend, wanted, [1290, 1, 9], tensors))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], each) for each in found)


def test_a_token_takes_5_bits_a_number() -> None:
    layout = built(NativeBackend, spec()).kv_layout()
    assert layout.page_bytes() * 8 == PAGE * 2 * 2 * 64 * 5
    assert layout.page_bytes() == built(GroupedBackend, spec()).kv_layout().page_bytes()


def test_refusals_have_reasons() -> None:
    verdict = NativeBackend.accepts(spec(head_size=48), DEVICE.capability)
    assert "groups of 32 numbers of 4 bits, the head size is 48" in verdict.reason
    verdict = NativeRowsBackend.accepts(spec(), DEVICE.capability)
    assert "or int8, asked for torch.uint4" in verdict.reason
