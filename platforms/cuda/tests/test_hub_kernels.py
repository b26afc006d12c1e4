"""Kernels of the Hub are found in the cache, checked by their build metadata, and called.

If the package ``kernels`` is not installed, a stand-in wheel loads folders in the same way. The
kernels are folders in the Hub's layout that compute on the CPU.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from platforms.cuda.tests.wheels import install, wheel

from interposer import Capability, Config, Device, Request, Resolver, Site, current_registry
from interposer.records import Kernel
from interposer_cuda._hub import cache as hub_cache
from interposer_cuda._hub import kernels as hub_kernels
from interposer_cuda._hub.cache import ACTIVATION, LAYER_NORM, HubKernel
from interposer_cuda.plugin import interposer_records
from interposer_ops import activations, norms
from interposer_testing import check_kernel

KERNELS = """
import importlib.util


def get_local_kernel(repo_path, *, backend=None, trust_remote_code=False, user_agent=None):
    for folder in (repo_path, repo_path / "build"):
        path = folder / "torch-cpu" / "__init__.py"
        if path.exists():
            spec = importlib.util.spec_from_file_location("a_kernel_of_the_hub", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise FileNotFoundError(f"Cannot find a build variant for this system in {repo_path}:")
"""
# Activations are rounded before they are multiplied, as the kernels in CUDA do.
CODE = {
    ACTIVATION: """
from torch.nn import functional


def gated(activation, first=True):
    def function(out, x):
        assert out.is_contiguous() and x.is_contiguous() and out.dtype == x.dtype and out.numel()
        gate, other = x.chunk(2, -1)
        gate, other = (gate, other) if first else (other, gate)
        return out.copy_(activation(gate.float()).to(x.dtype) * other)
    return function


def single(activation):
    def function(out, x):
        assert out.is_contiguous() and x.is_contiguous() and out.dtype == x.dtype and out.numel()
        return out.copy_(activation(x.float()))
    return function


def tanh(x):
    return functional.gelu(x, approximate="tanh")


silu_and_mul = gated(functional.silu)
gelu_and_mul, gelu_tanh_and_mul = gated(functional.gelu), gated(tanh)
gelu, gelu_tanh = single(functional.gelu), single(tanh)
gelu_quick = single(lambda x: x * (1.702 * x).sigmoid())
""",
    LAYER_NORM: """
def dropout_add_ln_fwd(
    input, gamma, beta, rowscale, colscale, x0_subset, z_subset, dropout_p, epsilon,
    rowscale_const, z_numrows, gen, residual_in_fp32, is_rms_norm,
):
    for other in (rowscale, colscale, x0_subset, z_subset, gen):
        assert other is None
    assert (dropout_p, rowscale_const, z_numrows) == (0, 1, len(input)) and not residual_in_fp32
    assert input.ndim == 2 and input.is_contiguous() and gamma.is_contiguous()
    assert input.shape[1] % 8 == 0 and input.shape[1] <= 8192 and len(input)
    x = input.float()
    x = x if is_rms_norm else x - x.mean(-1, keepdim=True)
    z = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * gamma
    return [(z if beta is None else z + beta).to(input.dtype), None, None, None, None]
""",
}
OPS = {
    op.name: op
    for op in (
        activations.silu_and_mul,
        activations.gelu_and_mul,
        activations.gelu,
        activations.quick_gelu,
        norms.rms_norm,
        norms.layer_norm,
    )
}
RECORDS = {
    record.op: record
    for record in interposer_records()
    if isinstance(record, Kernel) and record.name.endswith("_hub")
}
PARTS = {"interposer-ops", "interposer-cuda"}
Put = Callable[..., None]


def build(folder: Path, kernel: HubKernel, variant: str = "torch-cpu", **stated: Any) -> None:
    place = folder / "build" / variant
    place.mkdir(parents=True)
    name = kernel.repository.rpartition("/")[2]
    facts = {"id": f"_{name}_1", "name": name, "version": 1, "license": "MIT"}
    facts |= {"python-depends": [], "backend": {"type": "cpu"}, **stated}
    (place / "metadata.json").write_text(json.dumps(facts))
    (place / "__init__.py").write_text(CODE[kernel])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a package that loads kernels, empty where the real one is installed."""
    folder = tmp_path_factory.mktemp("package")
    try:
        version("kernels")
    except PackageNotFoundError:
        install(folder, wheel(folder, "kernels", "0.17.2", {"kernels": KERNELS}))
    return folder / "site"


@pytest.fixture
def put(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Return a function that puts a kernel into the hub's cache."""
    monkeypatch.syspath_prepend(package)
    importlib.invalidate_caches()
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)

    def write(kernel: HubKernel, **stated: Any) -> None:
        stored = tmp_path / "cache" / f"kernels--{kernel.repository.replace('/', '--')}"
        (stored / "refs").mkdir(parents=True)
        (stored / "refs/v1").write_text("0123abcd")
        build(stored / "snapshots/0123abcd", kernel, **stated)

    hub_kernels._module.cache_clear()
    yield write
    hub_kernels._module.cache_clear()


def request(op: str, architecture: str = "sm_90") -> Request:
    return Request("kernel", op, "a place", Capability(architecture), "bfloat16")


def test_functions_match_the_ops(put: Put) -> None:
    for kernel in CODE:
        put(kernel)
    assert set(RECORDS) == set(OPS)
    for name, op in OPS.items():
        checked = 0
        for case in op.cases(torch.bfloat16, 0):
            if (
                RECORDS[name].requires.judge(replace(request(name), dims=case.dims))
                and checked < 12
            ):
                checked += 1
                assert check_kernel(op, getattr(hub_kernels, name), case) == [], (name, case.label)
        assert checked >= 5, name


def test_a_preferred_hub_kernel_is_bound(put: Put) -> None:
    put(ACTIVATION)
    config = Config(plugins=PARTS, isolation="off", kernels={"silu_and_mul": "silu_and_mul_hub"})
    device = Device("cuda", "cpu", "the CPU as a stand-in", Capability("sm_90"))
    resolver = Resolver(current_registry(config), device, config, trusted=frozenset(PARTS))
    site = Site(resolver, "a place", torch.bfloat16)
    function = site.bind(activations.silu_and_mul, intermediate_size=16)
    assert function is hub_kernels.silu_and_mul


def test_a_missing_kernel_is_refused_without_a_download(put: Put, tmp_path: Path) -> None:
    reason = ACTIVATION.judge(request("gelu")).reason
    assert reason == (
        f"kernels-community/activation is not in the cache {tmp_path / 'cache'}, and nothing is "
        "downloaded to choose. Try: kernels.install_kernel('kernels-community/activation', "
        "version=1), or LOCAL_KERNELS=kernels-community/activation=FOLDER"
    )


def test_local_kernels_take_precedence_over_the_cache(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "own", ACTIVATION)
    own = f"a/b=/nowhere:kernels-community/activation={tmp_path / 'own'}"
    monkeypatch.setenv("LOCAL_KERNELS", own)
    assert hub_cache.judge_activation(request("gelu"))
    assert hub_kernels.confirm_activation(request("gelu"))
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/activation={tmp_path / 'none'}")
    assert "is not in the cache" in hub_cache.judge_activation(request("gelu")).reason


@pytest.mark.parametrize(
    ("archs", "architecture", "accepted"),
    [
        (["8.0", "9.0a"], "sm_75", False),
        (["8.0", "9.0a"], "sm_86", True),
        (["8.0", "9.0a"], "sm_90", True),
        (["8.0", "9.0a"], "sm_100", False),
        (["8.0+PTX"], "sm_120", True),
        (["10.0f"], "sm_103", True),
        (["of the future"], "sm_75", True),
        ([], "sm_75", True),
    ],
)
def test_builds_for_other_gpus_are_refused(
    archs: list[str], architecture: str, accepted: bool, put: Put
) -> None:
    put(LAYER_NORM, backend={"type": "cuda", "archs": archs})
    verdict = hub_cache.judge_layer_norm(request("rms_norm", architecture))
    assert verdict.accepted == accepted
    if not accepted:
        assert verdict.reason == (
            "kernels-community/layer-norm was built for 8.0, 9.0a, the device is " + architecture
        )


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        (
            {"kernel-depends": [{"repo-id": "acme/other", "version": 1}]},
            "kernels-community/activation needs acme/other of the hub, which loading it could",
        ),
        ({"backend": "unknown"}, "kernels-community/activation has no build with metadata.json"),
    ],
)
def test_builds_that_need_a_download_are_refused(
    stated: dict[str, Any], reason: str, put: Put
) -> None:
    put(ACTIVATION, **stated)
    assert hub_cache.judge_activation(request("gelu")).reason.startswith(reason)


def test_a_build_that_fails_to_load_is_refused_when_selected(put: Put) -> None:
    put(LAYER_NORM, variant="torch29-cxx11-cu128-x86_64-linux", backend={"type": "cuda"})
    assert hub_cache.judge_layer_norm(request("rms_norm"))
    reason = hub_kernels.confirm_layer_norm(request("rms_norm")).reason
    assert reason.startswith(
        "kernels-community/layer-norm cannot be loaded: Cannot find a build variant"
    )
