"""Latent attention by stand-in packages: their arguments, and the steps left to the op.

Dimensions: T tokens, N heads, X selected tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from platforms.cuda.tests.fake_packages import IMPORTED
from platforms.cuda.tests.test_providers import HOPPER, LATENT, LATENT_SPEC, site

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, Case, Request
from interposer_cuda._flash_mla import sparse
from interposer_cuda._flash_mla.latent_backend import FlashMLABackend
from interposer_cuda._flashinfer.latent_backend import FlashInferLatentBackend
from interposer_ops.latent_attention import sparse_latent_attention
from interposer_ops.layers.attention import LatentBackend
from interposer_testing import attention_specs, check_attention, check_kernel
from interposer_testing.workload import paged_batch, random_projections

pytestmark = pytest.mark.process

SPECS = [
    spec
    for label, spec in attention_specs(page_sizes=(64,))
    if label.startswith("latent 512+64") and spec.dtype == torch.bfloat16
]


@pytest.mark.landing(1)
@pytest.mark.parametrize(("page_size", "num_heads"), [(4, 2), (16, 2), (4, 3)])
def test_flashinfer_attends_as_the_op_defines(
    packages: None, page_size: int, num_heads: int
) -> None:
    (spec,) = (spec for spec in SPECS if spec.page_size == page_size)
    spec = replace(spec, num_heads=num_heads)
    assert FlashInferLatentBackend.accepts(spec, HOPPER)
    assert check_attention(FlashInferLatentBackend, spec, site(spec.dtype)) == []
    # Some query of a prompt may miss a key where tiles end within the heads of another.
    prompts = [count for count in import_module("flashinfer").RUNS if count > 6]
    assert bool(prompts) == (num_heads == 2)


@pytest.mark.landing(1)
@pytest.mark.parametrize("form", ["", "older"])
def test_flash_mla_attends_as_the_op_defines(
    packages: None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = import_module("flash_mla")
    if form:
        monkeypatch.setattr(package, "get_mla_metadata", package.older_metadata)
        monkeypatch.setattr(package, "flash_mla_with_kvcache", package.older_attention)
    (spec,) = (spec for spec in SPECS if FlashMLABackend.accepts(spec, HOPPER))
    assert check_attention(FlashMLABackend, spec, site(spec.dtype)) == []
    package.CALLS.clear()
    for counts, expected in (((1, 1, 1), [1]), ((3, 3), [3]), ((1, 3), []), ((129,), [])):
        compare_with_the_op(FlashMLABackend, spec, counts)
        assert expected == package.CALLS
        package.CALLS.clear()


@pytest.mark.parametrize("kind", LATENT)
def test_a_step_may_be_empty(packages: None, kind: Any) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch(
        query_starts=none.new_zeros(1),
        seq_lens=none,
        page_table=none.view(0, 1),
        slots=none,
        max_query_tokens=0,
        max_seq_tokens=0,
    )
    backend = kind(LATENT_SPEC, site(LATENT_SPEC.dtype))
    (cache,) = backend.kv_layout().allocate(1, 1, "cpu")
    given = random_projections(LATENT_SPEC, 0, torch.Generator(), fused=False)
    assert backend.forward(*given, cache, backend.plan(batch)).shape == (0, 2, 512)


def compare_with_the_op(
    kind: type[AttentionBackend], spec: AttentionSpec, counts: Sequence[int]
) -> None:
    """Let a backend and that of the ops take a step of so many tokens of each sequence."""
    tables = list(torch.randperm(3 * len(counts)).view(len(counts), 3))
    batch = paged_batch(tables, [60, 5, 64][: len(counts)], counts, spec.page_size)
    generator = torch.Generator().manual_seed(0)
    given = random_projections(spec, sum(counts), generator, fused=True)
    found = []
    for backend in (kind(spec, site(spec.dtype)), LatentBackend(spec, site(spec.dtype))):
        (cache,) = backend.kv_layout().allocate(1, 3 * len(counts), "cpu")
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))
        query, key, value = given
        found.append((backend.forward(query, key, value, cache, backend.plan(batch)), cache))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_step_with_too_much_work_for_flashinfer_uses_the_op(packages: None) -> None:
    spec = replace(LATENT_SPEC, num_heads=128)
    backend = FlashInferLatentBackend(spec, site(spec.dtype))
    tables = [torch.arange(256)]
    for count, is_planned in ((15360, True), (15361, False)):
        batch = paged_batch(tables, [0], [count], spec.page_size)
        assert isinstance(backend.plan(batch), AttentionBatch) != is_planned


COMMON: list[tuple[dict[str, Any], str]] = [
    ({"latent": False}, "serves latent attention only"),
    ({"sparse": True, "top_k": 4}, "does not do sparse"),
    ({"dtype": torch.float32, "cache_dtype": torch.float32}, "computes in 16 bit floats, got"),
    ({"cache_dtype": torch.float8_e4m3fn}, "stores the cache as torch.bfloat16"),
    ({"latent_size": 448}, "needs latents of 512 + 64, got 448 + 128"),
    ({"window_tokens": 8}, "has neither windows nor a softcap"),
]
OWN = {
    FlashInferLatentBackend: ({"num_heads": 160}, "takes up to 128 heads, got 160"),
    FlashMLABackend: ({"page_size": 16}, "reads pages of 64 tokens, got 16"),
}


@pytest.mark.parametrize("backend", LATENT)
def test_unsupported_attention_is_refused(packages: None, backend: Any) -> None:
    assert backend.accepts(LATENT_SPEC, HOPPER)
    for change, expected in [*COMMON, OWN[backend]]:
        assert backend.accepts(replace(LATENT_SPEC, **change), HOPPER).reason.startswith(expected)
    # Neither is a package imported for a device that is only described.
    backend(LATENT_SPEC, site(LATENT_SPEC.dtype, described=True))
    assert not IMPORTED & {*sys.modules}


def named(num_tokens: int) -> Case:
    """Return a case of tokens that name 128 others at most, of 64 heads."""
    assert sparse_latent_attention.sample is not None
    dims: dict[str, Any] = {"num_heads": 64, "latent_size": 512, "rotary_size": 64}
    dims |= {"page_size": 16, "top_k": 128, "cache_dtype": "bfloat16", "scaled": False}
    return sparse_latent_attention.sample(torch.bfloat16, dims, num_tokens, 0)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_flash_mla_attends_to_selected_tokens_as_the_op_defines(
    packages: None, num_tokens: int
) -> None:
    case = named(num_tokens)
    kernel = sparse.sparse_latent_attention
    assert check_kernel(sparse_latent_attention, kernel, case) == []
    if num_tokens:
        # Some rows name nothing here and there, one nothing at all, and pages lie apart.
        indices, cache = case.arguments["indices"].clone(), case.arguments["cache"]
        indices[:, ::3] = -1
        indices[0] = -1
        apart = torch.empty(len(cache), 20, 576, dtype=cache.dtype)[:, :16]
        changed = {"indices": indices, "cache": apart.copy_(cache)}
        gaps = replace(case, arguments={**case.arguments, **changed})
        assert check_kernel(sparse_latent_attention, kernel, gaps) == []


def test_a_missing_sparse_function_is_refused(
    packages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = {"cache_dtype": "float8_e4m3fn"}
    request = Request("kernel", "sparse_latent_attention", "cuda", HOPPER, "bfloat16", dims)
    assert sparse.judge(request).reason.startswith("reads caches of bfloat16, as queries are")
    request = replace(request, dims={"cache_dtype": "bfloat16"})
    assert sparse.judge(request)
    assert sparse.confirm(request)
    monkeypatch.delattr("flash_mla.flash_mla_sparse_fwd")
    assert sparse.confirm(request).reason == (
        "flash_mla has no flash_mla_sparse_fwd. Try: pip install "
        "git+https://github.com/deepseek-ai/FlashMLA"
    )
