"""Attention to keys in rows, called from Python; the C++ tests check every level.

Dimensions: T tokens, N heads, K kv heads, D head size, C latent size, R rotary size, B sequences,
P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from interposer import (
    AttentionSpec,
    Capability,
    Case,
    Config,
    CustomOp,
    Request,
    Resolver,
    Site,
    current_registry,
)
from interposer.tooling import UINT4
from interposer_cpu import native
from interposer_cpu._kernels import dense
from interposer_cpu._kernels.rows_attention import NativeRowsBackend
from interposer_cpu._platform import CPUPlatform
from interposer_ops.attention import ragged_attention, ragged_attention_with_lse
from interposer_ops.latent_attention import latent_attention_decode
from interposer_testing import (
    Trial,
    attention_specs,
    check_attention,
    check_attention_batches,
    check_attention_determinism,
    check_kernel,
    conformance,
)
from interposer_testing.workload import paged_batch, random_projections

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(
    bool(native.why_absent()), reason=f"needs native kernels: {native.why_absent()}"
)

OPS = ("ragged_attention", "ragged_attention_with_lse", "latent_attention_decode")
DEVICE = CPUPlatform().devices()[0]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    native.force_level(None)


def site(dtype: torch.dtype) -> Site:
    return Site(Resolver(current_registry(), DEVICE, Config()), "attention", dtype)


def spec(**changes: Any) -> AttentionSpec:
    facts = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 40,
        "dtype": torch.float32,
        "page_size": 5,
        "scale": 0.3,
        **changes,
    }
    return AttentionSpec(**{"cache_dtype": facts["dtype"], **facts})


def trials() -> Iterator[Trial]:
    # Whether the records' conditions may be asked is no matter here.
    registry = current_registry(Config(isolation="off"))
    for op in OPS:  # the cases of other ops are not even built
        for trial in conformance(
            registry, DEVICE, distribution="interposer-cpu", op=op, quick=True
        ):
            if trial.candidate.name == f"{op}_native" and trial.aspect == "numerics":
                yield trial


@pytest.mark.parametrize(
    "level",
    # The lowest differs most from the best; those between are tried when there is time.
    [
        pytest.param(name, marks=[pytest.mark.slow] if index else [])
        for index, name in enumerate(native.levels()[:-1])
    ],
)
def test_kernels_conform_on_every_level_below_the_best(level: str) -> None:
    native.force_level(level)
    ran = set()
    for trial in islice(trials(), 0, None, 7):  # all of them take half a minute
        assert trial.run() == [], str(trial)
        ran.add(trial.candidate.name.removesuffix("_native"))
    assert ran == set(OPS)


def sampled(
    op: CustomOp[..., Any], dtype: torch.dtype, dims: dict[str, Any], num_tokens: int, seed: int
) -> Case:
    assert op.sample is not None
    return op.sample(dtype, dims, num_tokens, seed)


def ragged_dims(**changes: Any) -> dict[str, Any]:
    return {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_size": 48,
        "value_size": 40,
        "causal": True,
        "windowed": False,
        "softcapped": False,
        "sinks": False,
        "alibi": False,
        **changes,
    }


@pytest.mark.landing(2)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": False}, {"windowed": True, "alibi": True}, {"causal": False, "windowed": True}],
)
def test_sequences_of_many_query_blocks_are_correct(level: str, changes: dict[str, Any]) -> None:
    native.force_level(level)
    for dtype in (torch.float32, torch.bfloat16):
        case = sampled(ragged_attention, dtype, ragged_dims(**changes), 601, 0)
        assert check_kernel(ragged_attention, dense.ragged_attention, case) == []


@pytest.mark.slow
def test_lse_is_computed_from_unrounded_weights() -> None:
    dims = ragged_dims(sinks=True, softcapped=True)
    case = sampled(ragged_attention_with_lse, torch.bfloat16, dims, 300, 0)
    actual = check_kernel(ragged_attention_with_lse, dense.ragged_attention_with_lse, case)
    assert actual == []


def latent_step(dtype: torch.dtype, cache_dtype: torch.dtype) -> dict[str, Any]:
    """Draw arguments of a long context with split keys, and a short one; 3 and 1 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths, page = [1300, 40], 24
    num_pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(num_pages), generator=generator)
    table = torch.zeros(2, num_pages[0], dtype=torch.int64)
    table[0], table[1, : num_pages[1]] = order[: num_pages[0]], order[num_pages[0] :]
    cache = torch.rand(len(order), page, 80, generator=generator) * 2 - 1
    for b, length in enumerate(lengths):
        cache[table[b, num_pages[b] - 1], (length - 1) % page + 1 :] = torch.nan
    return {
        "query": (torch.rand(4, 20, 80, generator=generator) * 2 - 1).to(dtype),
        "cache": cache.to(cache_dtype),
        "page_table": table,
        "query_starts": torch.tensor([0, 3, 4]),
        "seq_lens": torch.tensor(lengths),
        "max_query_tokens": 3,
        "latent_size": 64,
        "scale": 0.3,
        "cache_scale": None if cache_dtype == dtype else torch.tensor([0.5]),
    }


@pytest.mark.landing(13)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, E4M3, torch.float8_e5m2])
def test_latent_attention_is_correct_over_split_contexts(
    level: str, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    native.force_level(level)
    step = latent_step(dtype, cache_dtype or dtype)
    exact = {**step, "query": step["query"].double(), "cache": step["cache"].double()}
    actual = dense.latent_attention_decode(**step)
    expected = latent_attention_decode.reference(**exact)
    # Values are between -1 and 1, and so is their mean: weights and result are rounded once each;
    # errors of float32 scores of at most 24 and of sums of a thousand terms.
    rounded = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, atol=rounded + 5e-5, rtol=0)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    before, results = torch.get_num_threads(), []
    case = sampled(ragged_attention, torch.bfloat16, ragged_dims(), 400, 0)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            latent = dense.latent_attention_decode(**latent_step(torch.bfloat16, E4M3))
            results.append((latent, dense.ragged_attention(**case.arguments)))
    finally:
        torch.set_num_threads(before)
    for actual in results[1:]:
        assert all(map(torch.equal, results[0], actual))


@pytest.mark.parametrize(
    ("stored", "is_read"), [("bfloat16", True), ("float8_e4m3fn", True), ("int8", False)]
)
def test_unsupported_latent_cache_dtypes_are_refused(stored: str, is_read: bool) -> None:
    dims = {"cache_dtype": stored}
    capability = DEVICE.capability
    request = Request("kernel", "latent_attention_decode", "cpu", capability, "bfloat16", dims)
    verdict = dense.judge_latent(request)
    assert bool(verdict) is is_read
    assert is_read or "got int8" in verdict.reason


@pytest.mark.landing(10)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize(
    ("label", "attention_spec"),
    [
        pytest.param(label, attention_spec, id=f"{label} {attention_spec.dtype}")
        for label, attention_spec in attention_specs()
        if attention_spec.page_size == 4 and attention_spec.head_size in (32, 80)
        if not (
            attention_spec.alibi or attention_spec.prefix_lm or attention_spec.cache_dtype == UINT4
        )
        if attention_spec.type == "decoder" or attention_spec.window_tokens is None
        if label.startswith(("GQA full", "MQA window"))
    ],
)
def test_the_rows_backend_conforms_to_the_ops(
    level: str, label: str, attention_spec: AttentionSpec
) -> None:
    native.force_level(level)
    assert not check_attention(NativeRowsBackend, attention_spec, site(attention_spec.dtype))


@pytest.mark.landing(7)
@pytest.mark.parametrize("change", [{}, {"window_tokens": 6}, {"sinks": True}, {"softcap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rows_backend_keeps_its_declared_properties(
    dtype: torch.dtype, change: dict[str, Any]
) -> None:
    attention_spec = spec(dtype=dtype, **change)
    assert not check_attention(NativeRowsBackend, attention_spec, site(dtype))
    assert not check_attention_determinism(NativeRowsBackend, attention_spec, site(dtype))
    assert not check_attention_batches(NativeRowsBackend, attention_spec, site(dtype))


def test_the_rows_backend_is_selected_for_sizes_without_tiles() -> None:
    place = site(torch.bfloat16)
    for change in ({"page_size": 4}, {"page_size": 16}, {"cache_dtype": E4M3, "sinks": True}):
        attention_spec = spec(dtype=torch.bfloat16, **change)
        assert isinstance(place.resolver.attention(attention_spec, place), NativeRowsBackend)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "encoder"}, "encoder"),
        ({"dtype": torch.float64}, "float64"),
        ({"num_kv_heads": 3}, "3 kv heads"),
        ({"cache_dtype": torch.bfloat16}, "or int8, requested torch.bfloat16"),
        ({"latent": True}, "latent"),
        ({"alibi": True}, "alibi"),
    ],
)
def test_refusals_have_reasons(change: dict[str, Any], reason: str) -> None:
    verdict = NativeRowsBackend.accepts(spec(**change), DEVICE.capability)
    assert not verdict
    assert reason in verdict.reason
    assert "riscv64" in NativeRowsBackend.accepts(spec(), Capability("riscv64")).reason


@pytest.mark.slow
def test_the_compiled_rows_backend_calls_the_registered_op() -> None:
    attention_spec = spec(cache_dtype=E4M3)
    backend = NativeRowsBackend(attention_spec, site(attention_spec.dtype))
    plan = backend.plan(paged_batch([torch.tensor([2, 0, 1])], [0], [12], attention_spec.page_size))
    query, key, value = random_projections(
        attention_spec, 12, torch.Generator().manual_seed(0), fused=True
    )
    scales = backend.prepare_scales(torch.tensor([0.01]), torch.tensor([0.02]))
    compiled = torch.compile(backend.forward, backend="aot_eager", fullgraph=True)
    results = []
    for attend in (backend.forward, compiled):
        (cache,) = backend.kv_layout().allocate(1, 3, "cpu")
        results.append(attend(query, key, value, cache, plan, scales=scales))
    assert torch.equal(*results)


def test_calls_with_too_few_arguments_are_refused() -> None:
    library = native.library()
    for name in ("ragged_attention", "latent_attention", "page_attention"):
        with pytest.raises(TypeError, match="arguments, got 1"):
            getattr(library, name)(1)
