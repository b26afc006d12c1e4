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


def built(kind: type[AttentionBackend], attention_spec: AttentionSpec) -> AttentionBackend:
    return kind(
        attention_spec,
        Site(Resolver(current_registry(), DEVICE, Config()), "", attention_spec.dtype),
    )


def outputs(
    kind: type[AttentionBackend],
    attention_spec: AttentionSpec,
    counts: list[int],
    tensors: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Compute a sequence in steps of the given numbers of tokens."""
    backend, length = built(kind, attention_spec), sum(counts)
    pages = torch.arange(-(-length // PAGE)).flip(0)
    (cache,) = backend.kv_layout().allocate(1, len(pages), "cpu")
    cache.view(torch.uint8).fill_(0xFF)
    scales = torch.full((2, 1), 1 / 40).unbind()
    actual, start = [], 0
    for count in counts:
        plan = backend.plan(paged_batch([pages], [start], [count], PAGE))
        query, key, value = (x[start : start + count] for x in tensors)
        options = {}
        if attention_spec.is_quantized:
            options["scales"] = backend.prepare_scales(*scales)
        actual.append(backend.forward(query, key, value, cache, plan, **options))
        start += count
    return torch.cat(actual)


def drawn(attention_spec: AttentionSpec, length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    heads = (attention_spec.num_heads, attention_spec.num_kv_heads, attention_spec.num_kv_heads)
    shapes = ((length, count, attention_spec.head_size) for count in heads)
    return tuple(torch.randn(s, generator=generator).to(attention_spec.dtype) for s in shapes)


@pytest.mark.landing(8)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize(
    ("label", "attention_spec"),
    [
        pytest.param(label, attention_spec, id=f"{label} {attention_spec.dtype}")
        for label, attention_spec in attention_specs(page_sizes=(PAGE,))
        if attention_spec.cache_dtype == UINT4 and label.startswith(("GQA", "MQA window"))
    ],
)
def test_every_level_conforms_to_the_ops(
    level: str, label: str, attention_spec: AttentionSpec
) -> None:
    native.force_level(level)
    place = Site(Resolver(current_registry(), DEVICE, Config()), "attention", attention_spec.dtype)
    assert not check_attention(NativeBackend, attention_spec, place)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    numbers=st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64),
    level=st.sampled_from(native.levels() or ("",)),
)
def test_the_only_token_gives_the_value_as_the_reference_rounds_it(
    numbers: list[float], level: str
) -> None:
    native.force_level(level)
    attention_spec = spec(num_heads=1, num_kv_heads=1)
    value = torch.tensor(numbers).view(1, 1, 64)
    query = torch.zeros(1, 1, 64)
    actual = outputs(NativeBackend, attention_spec, [1], (query, query, value))
    expected = read_groups(round_groups(value), torch.float32)
    # Base and step times code are added in either order of rounding.
    torch.testing.assert_close(
        actual, expected, rtol=2.0**-22, atol=1e-6 * float(value.abs().max())
    )


@pytest.mark.landing(5)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("change", [{}, {"window_tokens": 70}, {"softcap": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_int4_cache_gives_the_results_of_the_portable_backend(
    level: str, change: dict[str, Any], dtype: torch.dtype
) -> None:
    native.force_level(level)
    attention_spec = spec(dtype=dtype, **change)
    tensors, counts = drawn(attention_spec, 643), [1, 30, 500, 1, 7, 103, 1]
    actual, expected = (
        outputs(kind, attention_spec, counts, tensors).double()
        for kind in (NativeBackend, GroupedBackend)
    )
    # In 16 bits either rounds numbers of up to 4, and weights or values once more.
    error = 4 * 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 2e-5
    torch.testing.assert_close(actual, expected, rtol=0, atol=error)


@pytest.mark.landing(16)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, UINT4])
def test_prefill_and_single_tokens_give_the_same_results(
    level: str, cache_dtype: torch.dtype
) -> None:
    native.force_level(level)
    attention_spec = spec(dtype=torch.bfloat16, cache_dtype=cache_dtype, num_heads=6)
    tensors = drawn(attention_spec, 90)
    whole, single = (
        outputs(NativeBackend, attention_spec, counts, tensors).double()
        for counts in ([90], [1] * 90)
    )
    # Weights, or values of 4 bits and of up to 4, are rounded to bfloat16 in one of them.
    torch.testing.assert_close(whole, single, rtol=0, atol=3 * 4 * 2.0**-8)
    assert (whole - single).abs().mean() < 2.0**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_attention_does_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    before, actual = torch.get_num_threads(), []
    attention_spec = spec(dtype=dtype)
    tensors = drawn(attention_spec, 1300)
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            actual.append(outputs(NativeBackend, attention_spec, [1290, 1, 9], tensors))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(actual[0], each) for each in actual)


def test_the_int4_cache_takes_5_bits_per_number() -> None:
    layout = built(NativeBackend, spec()).kv_layout()
    assert layout.page_bytes() * 8 == PAGE * 2 * 2 * 64 * 5
    assert layout.page_bytes() == built(GroupedBackend, spec()).kv_layout().page_bytes()


def test_refusals_have_reasons() -> None:
    verdict = NativeBackend.accepts(spec(head_size=48), DEVICE.capability)
    assert "groups of 32 numbers of 4 bits, the head size is 48" in verdict.reason
    verdict = NativeRowsBackend.accepts(spec(), DEVICE.capability)
    assert "or int8, requested torch.uint4" in verdict.reason
