"""Optional packages: supported versions, and arguments of their functions.

The tests build and install a stand-in wheel for each package. Its functions compute on the CPU as
the package's documentation defines.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from platforms.cuda.tests.fake_packages import IMPORTED, MODULES
from platforms.cuda.tests.wheels import install, wheel
from tests.landing import landing_sample

from interposer import (
    AttentionBackend,
    AttentionSpec,
    Capability,
    Config,
    Device,
    Request,
    Resolver,
    Site,
    current_registry,
)
from interposer.errors import RequestError
from interposer_cuda._flash_attention.version_2 import (
    FlashAttention2Backend,
    FlashAttention2GatheredBackend,
)
from interposer_cuda._flash_attention.version_3 import FlashAttention3Backend
from interposer_cuda._flash_mla.latent_backend import FlashMLABackend
from interposer_cuda._flashinfer import latent as flashinfer_latent
from interposer_cuda._flashinfer.attention import FlashInferBackend
from interposer_cuda._flashinfer.latent_backend import FlashInferLatentBackend
from interposer_ops.latent_attention import latent_attention_decode
from interposer_testing import attention_specs, check_attention, check_kernel
from interposer_testing.workload import random_projections, typical_step

pytestmark = pytest.mark.process

HOPPER = Capability("sm_90", formats=frozenset({"bfloat16", "float16"}))
DEVICE = Device("none", "cpu", "a device without kernels of its own", Capability("any"))
BACKENDS: dict[type[AttentionBackend], tuple[str, str]] = {
    FlashAttention2Backend: ("flash-attn", ">=2.6,<2.9"),
    FlashAttention2GatheredBackend: ("flash-attn", ">=2.6,<2.9"),
    FlashAttention3Backend: ("flash-attn-3", ">=3.0.0b1,<3.1"),
    FlashInferBackend: ("flashinfer-python", ">=0.6,<0.8"),
}
LATENT: dict[type[AttentionBackend], tuple[str, str]] = {
    FlashInferLatentBackend: ("flashinfer-python", ">=0.6,<0.8"),
    FlashMLABackend: ("flash-mla", ">=1.0,<1.1"),
}
# Sequences of many pages of 256 tokens take long to compare.
LARGE = {"MHA full head 32 page 4", "GQA window+softcap head 32 page 4"}


def site(dtype: torch.dtype, *, described: bool = False) -> Site:
    registry = current_registry(Config(plugins={"interposer-ops"}))
    return Site(Resolver(registry, DEVICE, Config(), described=described), "attention", dtype)


def served(backend: type[AttentionBackend]) -> Iterator[tuple[str, AttentionSpec]]:
    """Yield the suite's specs that the backend accepts, in sizes that it reads."""
    large = backend is FlashAttention2Backend
    for label, spec in attention_specs(quick=not large):
        if spec.dtype != torch.bfloat16 or (large and label not in LARGE):
            continue
        own = replace(spec, num_heads=spec.num_heads // spec.num_kv_heads * 2, num_kv_heads=2)
        own = replace(own, head_size=max(spec.head_size, 64), page_size=256 if large else 4)
        if backend.accepts(own, HOPPER):
            yield label, own


@pytest.mark.parametrize("backend", landing_sample(BACKENDS, every=2))
def test_packages_receive_the_documented_arguments(
    packages: None, backend: type[AttentionBackend]
) -> None:
    checked = []
    for label, spec in served(backend):
        assert check_attention(backend, spec, site(spec.dtype)) == [], label
        checked.append(spec)
    assert {bool(spec.window_tokens) for spec in checked} == {True, False}
    assert {bool(spec.softcap) for spec in checked} == {True, False}
    assert {spec.num_heads > spec.num_kv_heads for spec in checked} == {True, False}
    rounded = {spec.cache_dtype for spec in checked if spec.is_quantized}
    of_8_bits = {torch.float8_e4m3fn, torch.float8_e5m2}
    assert rounded == (of_8_bits if backend is FlashInferBackend else set())


def test_flashinfer_attends_to_latents_as_the_op_defines(packages: None) -> None:
    checked = 0
    for case in latent_attention_decode.cases(torch.bfloat16, 0):
        query, cache = case.arguments["query"], case.arguments["cache"]
        if case.arguments["latent_size"] != 512 or cache.dtype != query.dtype:
            continue
        checked += 1
        kernel = flashinfer_latent.latent_attention_decode
        assert check_kernel(latent_attention_decode, kernel, case) == [], case.label
        scaled = replace(case, arguments={**case.arguments, "cache_scale": torch.tensor([0.75])})
        assert check_kernel(latent_attention_decode, kernel, scaled) == [], case.label
    assert checked


@pytest.mark.parametrize("kind", [FlashInferBackend, FlashInferLatentBackend])
def test_a_plan_is_refused_after_the_next_one(packages: None, kind: type[AttentionBackend]) -> None:
    spec = asked(kind)
    backend = kind(spec, site(spec.dtype))
    batch, num_pages = typical_step(4, spec.page_size)
    (cache,) = backend.kv_layout().allocate(1, num_pages, "cpu")
    query, key, value = random_projections(spec, 4, torch.Generator(), fused=False)
    stale, last = backend.plan(batch), backend.plan(batch)
    out = backend.forward(query, key, value, cache.zero_(), last)
    assert out.shape == (4, spec.num_heads, value.shape[-1])
    with pytest.raises(RequestError, match="the plan is number 1 of this backend, whose wrapper"):
        backend.forward(query, key, value, cache, stale)


SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    page_size=256,
    scale=0.125,
)
LATENT_SPEC = AttentionSpec(
    num_heads=2,
    num_kv_heads=1,
    head_size=576,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    page_size=64,
    scale=0.125,
    latent=True,
    latent_size=512,
)


def asked(backend: type[AttentionBackend]) -> AttentionSpec:
    """Return a spec that the backend takes."""
    return LATENT_SPEC if backend in LATENT else SPEC


FLOAT_8: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn}
EVERY: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float32, "cache_dtype": torch.float32}, "computes in 16 bit floats, got"),
    ({"num_heads": 3}, "needs heads in groups of one size, got 3 heads, 2 kv heads"),
    ({"sinks": True}, "does not do sinks"),
    ({"latent": True}, "does not do latent"),
    ({"alibi": True}, "does not do alibi"),
    ({"type": "encoder"}, "serves decoder attention only, got encoder"),
    ({"cache_dtype": torch.int8}, ""),
]
OWN: dict[type[AttentionBackend], list[tuple[dict[str, Any], str]]] = {
    FlashAttention2Backend: [
        ({"page_size": 16}, "reads pages of multiples of 256 tokens, got 16"),
        ({"head_size": 100}, "takes heads of multiples of 8 up to 256, got 100"),
        (FLOAT_8, "stores the cache as torch.bfloat16, requested torch.float8_e4m3fn"),
    ],
    FlashAttention2GatheredBackend: [
        (FLOAT_8, "stores the cache as torch.bfloat16, requested torch.float8_e4m3fn"),
    ],
    FlashAttention3Backend: [
        ({"head_size": 320}, "takes heads of multiples of 8 up to 256, got 320"),
        (FLOAT_8, "would round queries of torch.bfloat16 to the cache's torch.float8_e4m3fn"),
    ],
    FlashInferBackend: [
        ({"head_size": 80}, "takes heads of 64, 128, 256, got 80"),
        ({**FLOAT_8, "head_scales": True}, "takes one scale for all heads of a cache, got one"),
    ],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_unsupported_attention_is_refused(packages: None, backend: type[AttentionBackend]) -> None:
    assert backend.accepts(SPEC, HOPPER)
    for change, expected in [*EVERY, *OWN[backend]]:
        verdict = backend.accepts(replace(SPEC, **change), HOPPER)
        assert not verdict
        assert verdict.reason.startswith(expected)
    # Neither is a package imported for a device that is only described.
    backend(SPEC, site(SPEC.dtype, described=True))
    assert not IMPORTED & {*sys.modules}


def test_flashinfer_needs_the_dtype_in_hardware(packages: None) -> None:
    turing = Capability("sm_75", formats=frozenset({"float16"}))
    assert FlashInferBackend.accepts(SPEC, turing).reason == (
        "sm_75 has no matrix instructions for torch.bfloat16"
    )
    half = replace(SPEC, dtype=torch.float16, cache_dtype=torch.float16)
    assert FlashInferBackend.accepts(half, turing)


def test_a_latent_cache_of_another_dtype_is_refused(packages: None) -> None:
    dims: dict[str, int | str] = {"cache_dtype": "float8_e4m3fn", "num_heads": 16}
    request = Request("kernel", "latent_attention_decode", "cuda", HOPPER, "bfloat16", dims)
    assert flashinfer_latent.judge(request).reason == (
        "reads caches of bfloat16, as queries are, got float8_e4m3fn"
    )
    plain = replace(request, dims={**dims, "cache_dtype": "bfloat16"})
    assert flashinfer_latent.judge(plain)
    odd = replace(request, dims={**plain.dims, "num_heads": 40})
    assert flashinfer_latent.judge(odd).reason == "takes heads that divide 128, got 40"


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "versions", [("2.5.9", "2.8.3", "0.9.0", "0.5.3"), ("2.9.0", "3.1.0", "1.1.0", "0.8.0")]
)
def test_other_versions_are_refused_by_their_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: tuple[str, ...]
) -> None:
    found = dict(zip(MODULES, versions, strict=True))
    code = dict.fromkeys(IMPORTED, "raise SystemExit(1)")
    made = [
        wheel(tmp_path, name, version, {module: code[module] for module in MODULES[name]})
        for name, version in found.items()
    ]
    monkeypatch.syspath_prepend(install(tmp_path, *made))
    importlib.invalidate_caches()
    for backend, (name, known) in {**BACKENDS, **LATENT}.items():
        reason = backend.accepts(asked(backend), HOPPER).reason
        assert reason.startswith(f"needs {name} {known}, found {found[name]}: ")


@pytest.mark.parametrize("backend", [*BACKENDS, *LATENT])
def test_a_package_that_is_not_installed_is_refused(backend: type[AttentionBackend]) -> None:
    reason = backend.accepts(asked(backend), HOPPER).reason
    name, _ = {**BACKENDS, **LATENT}[backend]
    assert reason.startswith(f"needs the package {name}, which is not installed: ")
