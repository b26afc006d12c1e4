"""Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer import (
    AttentionBatch,
    AttentionSpec,
    Capability,
    Config,
    Resolver,
    Site,
    current_registry,
)
from interposer_cpu import native
from interposer_cpu._kernels.attention import NativeBackend
from interposer_cpu._platform import CPUPlatform
from interposer_testing import (
    attention_specs,
    check_attention,
    check_attention_batches,
    check_attention_determinism,
)
from interposer_testing.workload import paged_batch, random_projections

pytestmark = pytest.mark.skipif(
    bool(native.why_absent()), reason=f"needs native kernels: {native.why_absent()}"
)

DEVICE = CPUPlatform().devices()[0]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    native.force_level(None)


def spec(**changes: Any) -> AttentionSpec:
    facts = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.float32,
        "page_size": 16,
        "scale": 0.3,
        **changes,
    }
    return AttentionSpec(**{"cache_dtype": facts["dtype"], **facts})


def site(dtype: torch.dtype = torch.float32) -> Site:
    return Site(Resolver(current_registry(), DEVICE, Config()), "attention", dtype)


class Layer:
    """A cache, with all stored keys and values kept in float64."""

    def __init__(
        self, attention_spec: AttentionSpec, tables: list[list[int]], seed: int = 0
    ) -> None:
        self.spec = attention_spec
        self.tables = [torch.tensor(table) for table in tables]
        self.backend = NativeBackend(attention_spec, site(attention_spec.dtype))
        (self.cache,) = self.backend.kv_layout().allocate(1, 1 + max(map(max, tables)), "cpu")
        self.cache.view(torch.uint8).fill_(0xFF)  # no numbers, whatever the dtype
        empty = torch.empty(
            0, attention_spec.num_kv_heads, attention_spec.head_size, dtype=torch.float64
        )
        self.keys, self.values = ([empty for _ in tables] for _ in range(2))
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, counts: list[int]) -> AttentionBatch:
        starts = [len(keys) for keys in self.keys]
        return paged_batch(self.tables, starts, counts, self.spec.page_size)

    def step(self, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the backend's and the exact result for new tokens of each sequence."""
        plan = self.backend.plan(self.batch(counts))
        given = random_projections(self.spec, sum(counts), self.generator, fused=True)
        query, key, value = given
        actual = self.backend.forward(query, key, value, self.cache, plan)
        parts = (tensor.double().split(counts) for tensor in given)
        expected = []
        for b, (query, key, value) in enumerate(zip(*parts, strict=True)):
            self.keys[b] = torch.cat((self.keys[b], key))
            self.values[b] = torch.cat((self.values[b], value))
            expected.append(self._exact(query, self.keys[b], self.values[b]))
        return actual, torch.cat(expected)

    def _exact(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        attention_spec, length = self.spec, len(keys)
        group = attention_spec.num_heads // attention_spec.num_kv_heads
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qnd,lnd->nql", query, keys) * attention_spec.scale
        distance = torch.arange(length - len(query), length)[:, None] - torch.arange(length)
        visible = (distance >= 0) & (distance < (attention_spec.window_tokens or length))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("nql,lnd->qnd", weights, values)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Values are between -1 and 1, and so is their mean: weights and result are rounded once each.
    rounded = 2 * torch.finfo(actual.dtype).eps
    # Errors of float32 scores of at most 10 and of sums of some hundred terms.
    torch.testing.assert_close(actual.double(), expected, atol=rounded + 2e-5, rtol=0)


def rounded_step(attention_spec: AttentionSpec, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one token after others by the backend, and exactly.

    One early key outweighs every other key by far, but not all of them together.
    """
    generator = torch.Generator().manual_seed(1)
    table = [torch.arange(-(-length // attention_spec.page_size))]
    backend = NativeBackend(attention_spec, site(attention_spec.dtype))
    (cache,) = backend.kv_layout().allocate(1, len(table[0]), "cpu")
    query, key, value = random_projections(attention_spec, length, generator, fused=True)
    query[-1] = torch.tensor([1.0] + [2.0**-9] * (attention_spec.head_size - 1))
    key[..., 0], value[..., 0] = -0.5, 1.0
    key[3, :, 0], value[3] = 0.5, -0.25
    scales = torch.tensor([1 / 127]), torch.tensor([1 / 100])
    for start, count in ((0, length - 1), (length - 1, 1)):
        batch = paged_batch(table, [start], [count], attention_spec.page_size)
        new = slice(start, start + count)
        plan, prepared = backend.plan(batch), backend.prepare_scales(*scales)
        actual = backend.forward(query[new], key[new], value[new], cache, plan, scales=prepared)
    codes = ((x.float() / s).round() for x, s in zip((key, value), scales, strict=True))
    keys, values = (c.double() * s.double() for c, s in zip(codes, scales, strict=True))
    group = attention_spec.num_heads // attention_spec.num_kv_heads
    scores = torch.einsum("nd,lnd->nl", query[-1].double(), keys.repeat_interleave(group, 1))
    weights = (scores * attention_spec.scale).softmax(-1)
    assert (weights[:, 3] > 500 * weights[:, 4]).all()
    assert (weights[:, 3] < 0.6).all()
    return actual[0], torch.einsum("nl,lnd->nd", weights, values.repeat_interleave(group, 1))


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("length", [600, 1401])
def test_integer_attention_keeps_small_weights(level: str, length: int) -> None:
    native.force_level(level)
    actual, expected = rounded_step(
        spec(dtype=torch.bfloat16, cache_dtype=torch.int8, scale=6.3), length
    )
    # Weights are rounded to 2^-15 of the largest of 512, and so is the query: each of 511 weights
    # of 1/540 is off by 2^-16 at most, as much together as 2^-7 of their sum; on average they are
    # off by a hundredth of that. The result is rounded to 2^-9 of it, values are at most 1.
    torch.testing.assert_close(actual.double(), expected, atol=2.0**-8, rtol=0)


@pytest.mark.landing(7)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize(
    ("label", "attention_spec"),
    [
        pytest.param(label, attention_spec, id=f"{label} {attention_spec.dtype}")
        for label, attention_spec in attention_specs()
        if attention_spec.page_size == 16 and attention_spec.head_size in (32, 80)
        if label.startswith(("GQA", "MQA window"))
    ],
)
def test_every_level_conforms_to_the_ops(
    level: str, label: str, attention_spec: AttentionSpec
) -> None:
    native.force_level(level)
    assert not check_attention(NativeBackend, attention_spec, site(attention_spec.dtype))


@pytest.mark.landing(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "change", [{}, {"window_tokens": 6}, {"sinks": True}, {"softcap": 2.0, "page_size": 32}]
)
def test_prefixes_attend_in_both_directions(dtype: torch.dtype, change: dict[str, Any]) -> None:
    attention_spec = spec(dtype=dtype, prefix_lm=True, **change)
    assert NativeBackend.accepts(attention_spec, DEVICE.capability)
    assert not check_attention(NativeBackend, attention_spec, site(dtype))
    assert not check_attention_batches(NativeBackend, attention_spec, site(dtype))


@pytest.mark.parametrize("change", [{}, {"window_tokens": 6}, {"sinks": True}, {"softcap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_backend_keeps_its_declared_properties(
    dtype: torch.dtype, change: dict[str, Any]
) -> None:
    attention_spec = spec(dtype=dtype, **change)
    assert not check_attention_determinism(NativeBackend, attention_spec, site(dtype))
    assert not check_attention_batches(NativeBackend, attention_spec, site(dtype))


@pytest.mark.parametrize("cache_dtype", [E4M3, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("head_scales", [False, True])
def test_8_bit_caches_serve_float16(cache_dtype: torch.dtype, head_scales: bool) -> None:
    attention_spec = spec(dtype=torch.float16, cache_dtype=cache_dtype, head_scales=head_scales)
    assert not check_attention(NativeBackend, attention_spec, site(attention_spec.dtype))


@settings(max_examples=num_examples(40), deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1), (32, 1), (100, 1)]),
    head_size=st.sampled_from([16, 48, 112, 144]),
    page_size=st.sampled_from([16, 48]),
    window=st.none() | st.integers(1, 700),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    level=st.sampled_from(native.levels() or ("",)),
    num_threads=st.integers(1, 3),
    steps=st.lists(
        st.lists(st.sampled_from([0, 1, 3, 17, 130, 600]), min_size=3, max_size=3).filter(any),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
)
@pytest.mark.slow
def test_sequences_grow_over_parts_and_pages(
    heads: tuple[int, int],
    head_size: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    level: str,
    num_threads: int,
    steps: list[list[int]],
    data: st.DataObject,
) -> None:
    attention_spec = spec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        page_size=page_size,
        window_tokens=window,
        dtype=dtype,
        scale=head_size**-0.5,
    )
    counts = [-(-sum(column) // page_size) or 1 for column in zip(*steps, strict=True)]
    pages = data.draw(st.permutations(range(sum(counts))))
    tables = [sorted(pages[: counts[0]]), pages[counts[0] :][: counts[1]], pages[-counts[2] :]]
    native.force_level(level)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        layer = Layer(attention_spec, tables)
        for step in steps:
            assert_close(*layer.step(step))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_have_the_same_bits_with_any_threads(dtype: torch.dtype) -> None:
    before, actual = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            layer = Layer(spec(dtype=dtype), [list(range(90)), list(range(90, 100))])
            layer.step([1400, 3])
            actual.append(layer.step([1, 1])[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(actual[0], actual[1])
    assert torch.equal(actual[0], actual[2])


def test_noncontiguous_inputs_are_read_in_place_or_copied() -> None:
    layer = Layer(spec(), [[0, 1]])
    query, key, value = random_projections(layer.spec, 20, layer.generator, fused=True)
    expected = layer.backend.forward(
        query, key, value, layer.cache, layer.backend.plan(layer.batch([20]))
    )
    query, key, value = (
        x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (query, key, value)
    )
    batch = layer.batch([20])
    transposed = replace(batch, page_table=batch.page_table.t().contiguous().t())
    actual = layer.backend.forward(query, key, value, layer.cache, layer.backend.plan(transposed))
    assert torch.equal(actual, expected)


def test_a_large_score_does_not_overflow() -> None:
    layer = Layer(spec(scale=1e4), [[0, 1, 2]])
    actual, expected = layer.step([40])
    assert actual.isfinite().all()
    # One weight is 1 but where two scores are as near as float32 rounds them.
    assert (actual.double() - expected).abs().median() < 1e-5


def test_a_nan_in_the_cache_reaches_the_result() -> None:
    layer = Layer(spec(), [[0]])
    query, key, value = random_projections(layer.spec, 5, layer.generator, fused=False)
    query[3, 1] = torch.nan
    actual = layer.backend.forward(
        query, key, value, layer.cache, layer.backend.plan(layer.batch([5]))
    )
    assert actual.isnan().any(-1).nonzero().tolist() == [[3, 1]]


def test_a_compiled_layer_calls_the_op() -> None:
    layer, other = (Layer(spec(), [[0, 1]]) for _ in range(2))
    query, key, value = random_projections(layer.spec, 20, layer.generator, fused=True)
    plan, other_plan = layer.backend.plan(layer.batch([20])), other.backend.plan(other.batch([20]))
    expected = layer.backend.forward(query, key, value, layer.cache, plan)
    compiled = torch.compile(other.backend.forward, backend="aot_eager", fullgraph=True)
    actual = compiled(query, key, value, other.cache, other_plan)
    assert torch.equal(actual, expected)


def test_an_empty_batch_is_empty() -> None:
    layer = Layer(spec(), [[0]])
    nothing = torch.empty(0, dtype=torch.int64)
    batch = AttentionBatch(
        query_starts=torch.zeros(1, dtype=torch.int64),
        seq_lens=nothing,
        page_table=nothing.view(0, 1),
        slots=nothing,
        max_query_tokens=1,
        max_seq_tokens=1,
    )
    plan = layer.backend.plan(batch)
    query, key = torch.empty(0, 4, 32), torch.empty(0, 2, 32)
    assert layer.backend.forward(query, key, key, layer.cache, plan).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "encoder"}, "encoder"),
        ({"dtype": torch.float64}, "float64"),
        ({"num_kv_heads": 3}, "3 kv heads"),
        ({"head_size": 40}, "multiples of 16 up to 1024, got 40"),
        ({"head_size": 2048}, "multiples of 16 up to 1024, got 2048"),
        ({"page_size": 4}, "the page size is 4"),
        ({"cache_dtype": torch.bfloat16}, "int8 or uint4, requested torch.bfloat16"),
        ({"cache_dtype": torch.float8_e4m3fnuz}, "int8 or uint4, requested torch.float8_e4m3fnuz"),
        ({"latent": True}, "latent"),
        ({"sparse": True}, "sparse"),
        ({"prefix_lm": True, "cache_dtype": E4M3}, "prefix_lm"),
        ({"alibi": True}, "alibi"),
    ],
)
def test_refusals_have_reasons(change: dict[str, Any], reason: str) -> None:
    verdict = NativeBackend.accepts(spec(**change), DEVICE.capability)
    assert not verdict
    assert reason in verdict.reason


def test_other_processors_are_refused() -> None:
    verdict = NativeBackend.accepts(spec(), Capability("riscv64"))
    assert "riscv64" in verdict.reason
    verdict = NativeBackend.accepts(spec(), Capability("x86_64"))
    assert "avx2" in verdict.reason


@pytest.mark.landing(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [{}, {"softcap": 30.0}, {"sinks": True}, {"window_tokens": 9}])
def test_the_native_backend_is_selected_for_decoders(
    dtype: torch.dtype, change: dict[str, Any]
) -> None:
    place = site(dtype)
    assert isinstance(place.resolver.attention(spec(dtype=dtype, **change), place), NativeBackend)
