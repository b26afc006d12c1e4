"""All-reduce by FlashInfer, with stand-in functions on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from platforms.cuda.tests.fake_flashinfer_comm import Package

from interposer import Capability, Config, Device, Ranks, Registry, Request, Resolver
from interposer.errors import NoCandidateError
from interposer.tooling import Plugins
from interposer_cuda import plugin
from interposer_cuda._flashinfer import communicator as flashinfer
from interposer_ops import plugin as ops
from interposer_ops.norms import fused_add_rms_norm

H100 = Device("cuda", "cuda:0", "test", Capability("sm_90"))
KINDS = {
    torch.bfloat16: flashinfer.FlashInferCommunicator,
    torch.float16: flashinfer.FlashInferCommunicator,
    torch.float32: flashinfer.FlashInferFloat32Communicator,
}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made: Package = Package()  # type: ignore[no-untyped-call]
    monkeypatch.setitem(sys.modules, "flashinfer.comm", made)
    return made


def of(dtype: torch.dtype) -> flashinfer.FlashInferCommunicator:
    return KINDS[dtype](Ranks(1, 2, (0, 0), ("cuda", "cuda"), "both"), "cpu")


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(7,), (1, 4096), (3, 2880), (5, 3, 8), (0, 64)])
def test_tensors_of_any_shape_are_summed_in_rows_of_one_width(
    package: Package, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    communicator = of(dtype)
    given = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    for x in (given[..., ::2], given.flatten()[1:]):
        kept = x.clone()
        found = communicator.all_reduce(x)
        assert torch.equal(found, kept * 2)
        assert (found.shape, found.dtype) == (x.shape, dtype)
        assert torch.equal(x, kept)
    assert {rows[1] for _, rows in package.calls} <= {1024}
    assert len(package.made) == bool(package.calls)


def test_a_tensor_larger_than_the_workspace_is_summed_in_pieces(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "MOST_BYTES", 16 << 10)
    communicator = of(torch.float32)
    assert isinstance(communicator, flashinfer.FlashInferFloat32Communicator)
    x, stream, weight = torch.randn(10, 1500), torch.randn(10, 1500), torch.rand(1500)
    assert torch.equal(communicator.all_reduce(x), x * 2)
    assert [rows[0] for _, rows in package.calls] == [4, 4, 4, 3]
    package.calls.clear()
    x, stream, weight = x[:, :1024], stream[:, :1024], weight[:1024]
    found = communicator.all_reduce_add_rms_norm(x, stream, weight, 1e-5)
    assert package.calls == [(1, (4, 1024)), (1, (4, 1024)), (1, (2, 1024))]
    for ours, theirs in zip(found, fused_add_rms_norm(x * 2, stream, weight, 1e-5), strict=True):
        assert torch.allclose(ours, theirs)


@pytest.mark.parametrize(
    ("hidden", "patterns"), [(32, [1]), (5120, [1]), (16384, [1]), (101, [0]), (16416, [0])]
)
def test_supported_rows_use_the_fused_norm(
    package: Package, hidden: int, patterns: list[int]
) -> None:
    communicator = of(torch.float32)
    assert isinstance(communicator, flashinfer.FlashInferFloat32Communicator)
    x, stream, weight = torch.randn(3, hidden), torch.randn(3, hidden), torch.rand(hidden)
    expected = fused_add_rms_norm(x * 2, stream, weight, 1e-5)
    normed, total = communicator.all_reduce_add_rms_norm(x, stream, weight, 1e-5)
    assert torch.equal(normed, expected[0])
    assert torch.equal(total, expected[1])
    assert [pattern for pattern, _ in package.calls] == patterns


def test_the_workspace_is_created_for_the_group_and_freed_once(package: Package) -> None:
    communicator = of(torch.bfloat16)
    assert not package.made
    communicator.open()
    communicator.open()
    (workspace,) = package.made
    facts = workspace.facts
    named = ("backend", "world_size", "rank", "group", "dtype")
    assert [facts[name] for name in named] == ["trtllm", 2, 1, "both", torch.bfloat16]
    assert facts["max_token_num"] * facts["hidden_dim"] * 2 == flashinfer.MOST_BYTES
    communicator.close()
    communicator.close()
    assert package.freed == [workspace.ipc_handles]
    assert workspace.destroyed == 1


def test_a_communicator_that_never_opened_frees_nothing(package: Package) -> None:
    of(torch.float32).close()
    assert not package.made
    assert not package.freed


def chosen(collective: str, dtype: torch.dtype, ranks: Ranks, **rules: Any) -> Any:
    registry = Registry(Plugins.of(plugin, ops))
    config = Config(communicators=rules)
    resolver = Resolver(registry, H100, config, described=True, ranks=ranks)
    return resolver.communicator(collective, dtype, 4096, "model")[0]


def four(*hosts: int) -> Ranks:
    return Ranks(0, 4, hosts or (0,) * 4, ("cuda",) * 4)


def test_an_unproven_communicator_is_used_if_preferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("interposer_cuda._providers.version", lambda _: "0.7.2")
    assert chosen("all_reduce", torch.bfloat16, four()).chosen.name == "torch"
    for name, dtype in (("flashinfer", torch.float16), ("flashinfer_float32", torch.float32)):
        assert chosen("all_reduce", dtype, four(), all_reduce=name).chosen.name == name
    with pytest.raises(NoCandidateError, match="hosts"):
        chosen("all_reduce", torch.bfloat16, four(0, 0, 1, 1), all_reduce="flashinfer")
    fused = "all_reduce_add_rms_norm"
    assert chosen(fused, torch.float32, four()).chosen.name == "flashinfer_float32"
    with pytest.raises(NoCandidateError, match="dtype"):
        chosen(fused, torch.bfloat16, four())


@pytest.mark.parametrize(
    ("installed", "reason"),
    [("", "flashinfer-python, which is not installed"), ("0.6.4", "found 0.6.4")],
)
def test_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str, reason: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    if installed:
        monkeypatch.setattr("interposer_cuda._providers.version", lambda _: installed)
    with pytest.raises(NoCandidateError, match=reason):
        chosen("all_reduce", torch.bfloat16, four(), all_reduce="flashinfer")


def test_a_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NoCandidateError, match="built for CUDA"):
        chosen("all_reduce", torch.bfloat16, four(), all_reduce="flashinfer")


def test_function_parameters_are_checked_before_use(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = Capability("sm_90")
    request = Request("communicator", "all_reduce", "cuda", capability, "bfloat16", {"ranks": 2})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    assert "cannot read the memory" in flashinfer.confirm(request).reason
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    assert flashinfer.confirm(request)
    monkeypatch.setattr(
        package, "create_allreduce_fusion_workspace", lambda backend, world_size: None
    )
    assert "takes no dtype, group" in flashinfer.confirm(request).reason


def test_the_package_is_imported_when_the_communicator_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.comm", None)
    communicator = of(torch.bfloat16)
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        communicator.open()
    communicator.close()
