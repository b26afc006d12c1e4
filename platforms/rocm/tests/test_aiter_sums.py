"""Sums by AITER's custom all-reduce, with a class of the same meaning."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from interposer import Capability, Config, Device, Ranks, Registry, Resolver
from interposer.errors import NoCandidateError, RequestError
from interposer.tooling import Plugins
from interposer_ops import plugin as ops
from interposer_rocm import plugin
from interposer_rocm._aiter import sums

MI300X = Device("rocm", "cuda:0", "test", Capability("gfx942"))


class CustomAllreduce:
    """Adds up over two ranks that have the same; takes what the package takes."""

    def __init__(self, group: Any, device: str, max_size: int = 0) -> None:
        self.made = (group, device, max_size)
        self.closed = 0

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        assert input.is_contiguous()
        return None if input.nbytes % 16 else input * 2

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> sums.AiterCommunicator:
    name = "aiter.dist.device_communicators.custom_all_reduce"
    module = ModuleType(name)
    module.CustomAllreduce = CustomAllreduce  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return sums.AiterCommunicator(Ranks(0, 2, (0, 0), ("rocm", "rocm"), "group"), "cuda:0")


def test_it_adds_up_and_closes(communicator: sums.AiterCommunicator) -> None:
    assert communicator._own.made == ("group", "cuda:0", sums.MOST_BYTES)
    x = torch.ones(4, 16, dtype=torch.bfloat16)[:, ::2]
    assert torch.equal(communicator.all_reduce(x), x * 2)
    communicator.close()
    assert communicator._own.closed == 1


def test_what_it_does_not_take_is_an_error_with_a_way_out(
    communicator: sums.AiterCommunicator,
) -> None:
    with pytest.raises(RequestError, match="unset AITER_CUSTOM_AR_MAX_SIZE"):
        communicator.all_reduce(torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("num_bytes", "num", "reason"),
    [(4096, 3, "ranks"), (4100, 2, "bytes"), (4096, 2, "AITER, which is not installed")],
)
def test_what_it_cannot_do_is_refused(num_bytes: int, num: int, reason: str) -> None:
    ranks = Ranks(0, num, (0,) * num, ("rocm",) * num)
    config = Config(communicators={"all_reduce": "aiter"})
    registry = Registry(Plugins.of(plugin, ops))
    resolver = Resolver(registry, MI300X, config, described=True, ranks=ranks)
    with pytest.raises(NoCandidateError, match=reason):
        resolver.communicator("all_reduce", torch.bfloat16, num_bytes, "model")
