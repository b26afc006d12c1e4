"""All-reduce in symmetric memory, with stand-in ops on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interposer import Capability, Communicator, Config, Device, Ranks, Registry, Request, Resolver
from interposer.errors import NoCandidateError, RequestError
from interposer.tooling import Plugins
from interposer_cuda import plugin
from interposer_cuda._symmetric_memory import sums
from interposer_ops import plugin as ops

OPS = {
    "one_shot_all_reduce": sums.OneShot,
    "two_shot_all_reduce_": sums.TwoShot,
    "multimem_all_reduce_": sums.Multimem,
}
H100 = Device("cuda", "cuda:0", "test", Capability("sm_90"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int]]]:
    """Define the ops on the CPU, for two ranks that hold equal tensors."""
    seen: list[tuple[str, str, int]] = []

    def add_up(name: str) -> Any:
        def op(x: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
            assert x.is_contiguous()
            assert reduce_op == "sum"
            seen.append((name, group, x.nbytes))
            return x.mul_(2) if name.endswith("_") else x * 2

        return op

    monkeypatch.setattr(sums, "_shared_buffer", lambda _: torch.zeros(1 << 12, dtype=torch.uint8))
    monkeypatch.setattr(sums, "_memory", lambda: SimpleNamespace(rendezvous=lambda *_: None))
    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        for name in OPS:
            library.impl(name, add_up(name), "CPU")
        yield seen


def made(kind: type[Communicator]) -> Communicator:
    group = SimpleNamespace(group_name="both")
    return kind(Ranks(0, 2, (0, 0), ("cuda", "cuda"), group), "cpu")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_written_to_the_passed_tensor(
    calls: list[tuple[str, str, int]], name: str, dtype: torch.dtype
) -> None:
    communicator = made(OPS[name])
    for x in (torch.arange(7, dtype=dtype), torch.ones(3, 8, dtype=dtype)[:, ::2]):
        expected = x * 2
        assert communicator.all_reduce(x) is x
        assert torch.equal(x, expected)
    assert {call[:2] for call in calls} == {(name, "both")}
    assert not any(num_bytes % 16 for *_, num_bytes in calls)
    communicator.close()
    communicator.close()


def test_nothing_is_added_up_of_nothing(calls: list[tuple[str, str, int]]) -> None:
    x = torch.empty(0, 4)
    assert made(sums.OneShot).all_reduce(x) is x
    assert not calls


@pytest.mark.parametrize("name", OPS)
def test_more_than_the_buffer_holds_is_refused_by_its_bytes(
    calls: list[tuple[str, str, int]], name: str
) -> None:
    with pytest.raises(RequestError, match=r"4104 bytes exceed the shared buffer of 4096"):
        made(OPS[name]).all_reduce(torch.ones(1026))
    assert not calls


def chosen(num_bytes: int, ranks: Ranks, **config: Any) -> Any:
    registry = Registry(Plugins.of(plugin, ops))
    resolver = Resolver(registry, H100, Config(**config), described=True, ranks=ranks)
    return resolver.communicator("all_reduce", torch.bfloat16, num_bytes, "model")[0]


def test_an_unproven_communicator_is_used_if_preferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    four = Ranks(0, 4, (0,) * 4, ("cuda",) * 4)
    assert chosen(4096, four).chosen.name == "torch"
    pinned = {"communicators": {"all_reduce": "symmetric_memory_one_shot"}}
    assert chosen(4096, four, **pinned).chosen.name == "symmetric_memory_one_shot"
    with pytest.raises(NoCandidateError, match="bytes"):
        chosen(1 << 20, four, **pinned)
    with pytest.raises(NoCandidateError, match="hosts"):
        chosen(4096, Ranks(0, 4, (0, 0, 1, 1), ("cuda",) * 4), **pinned)


def test_a_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    request = Request("communicator", "all_reduce", "cuda", Capability("sm_90"), "bfloat16")
    assert "built for CUDA" in sums.judge(request).reason


def test_gpus_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(
        "communicator", "all_reduce", "cuda", Capability("sm_90"), "bfloat16", {"ranks": 4}
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "4 ranks need 4 GPUs" in sums.confirm(request).reason
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, other: other != 3)
    assert sums.confirm(request).reason == "GPU 1 cannot read the memory of GPUs [3]"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    assert sums.confirm(request)
    memory = SimpleNamespace(has_multicast_support=lambda *_: False)
    monkeypatch.setattr(sums, "_memory", lambda: memory)
    assert "no multicast" in sums.confirm_multimem(request).reason
