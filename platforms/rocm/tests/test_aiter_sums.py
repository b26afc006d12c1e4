"""AITER's custom and quick all-reduce, with stand-in classes."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from interposer import Capability, Config, Device, Ranks, Registry, Resolver, Verdict
from interposer.errors import ConfigError, NoCandidateError, RequestError
from interposer.tooling import Plugins
from interposer_ops import plugin as ops
from interposer_rocm import plugin
from interposer_rocm._aiter import sums

MODULES = "aiter.dist.device_communicators"
REGIME = "AITER_QUICK_REDUCE_QUANTIZATION"
CAST = "AITER_QUICK_REDUCE_CAST_BF16_TO_FP16"
TWO = Ranks(0, 2, (0, 0), ("rocm", "rocm"), "group")
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


class QuickAllReduce:
    """The same where the environment has switched it on, as it was when this was made."""

    qr_max_size = 4096

    def __init__(self, group: Any, device: str) -> None:
        self.made = (group, device)
        self.disabled = os.environ.get(REGIME, "NONE") == "NONE"
        self.closed = 0

    def quick_all_reduce(self, inp: torch.Tensor, *, out: Any = None) -> torch.Tensor:
        assert not self.disabled
        assert inp.is_contiguous()
        assert inp.nbytes
        return inp * 2

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> sums.AiterCommunicator:
    module = ModuleType(f"{MODULES}.custom_all_reduce")
    module.CustomAllreduce = CustomAllreduce  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return sums.AiterCommunicator(TWO, "cuda:0")


def test_the_custom_all_reduce_sums_and_closes(communicator: sums.AiterCommunicator) -> None:
    assert communicator._communicator.made == ("group", "cuda:0", sums.MOST_BYTES)
    x = torch.ones(4, 16, dtype=torch.bfloat16)[:, ::2]
    assert torch.equal(communicator.all_reduce(x), x * 2)
    communicator.close()
    assert communicator._communicator.closed == 1


def test_an_unsupported_size_is_an_error_with_alternatives(
    communicator: sums.AiterCommunicator,
) -> None:
    with pytest.raises(RequestError, match="unset AITER_CUSTOM_AR_MAX_SIZE"):
        communicator.all_reduce(torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("num_bytes", "num", "reason"),
    [(4096, 3, "ranks"), (4100, 2, "bytes"), (4096, 2, "AITER, which is not installed")],
)
def test_unsupported_requests_are_refused(num_bytes: int, num: int, reason: str) -> None:
    ranks = Ranks(0, num, (0,) * num, ("rocm",) * num)
    config = Config(communicators={"all_reduce": "aiter"})
    registry = Registry(Plugins.of(plugin, ops))
    resolver = Resolver(registry, MI300X, config, described=True, ranks=ranks)
    with pytest.raises(NoCandidateError, match=reason):
        resolver.communicator("all_reduce", torch.bfloat16, num_bytes, "model")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> sums.AiterQuickCommunicator:
    module = ModuleType(f"{MODULES}.quick_all_reduce")
    module.QuickAllReduce = QuickAllReduce  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv(REGIME, "FP")
    return sums.AiterQuickCommunicator(TWO, "cuda:0")


def test_the_quick_all_reduce_sums_and_closes(quick: sums.AiterQuickCommunicator) -> None:
    quick.open()
    assert quick._communicator.made == ("group", "cuda:0")
    x = torch.ones(4, 16, dtype=torch.bfloat16)[:, ::2]
    assert torch.equal(quick.all_reduce(x), x * 2)
    assert quick.all_reduce(x[:0]).shape == (0, 8)
    quick.close()
    assert quick._communicator.closed == 1


@pytest.mark.parametrize("count", [3, 4096])
def test_unsupported_sizes_of_the_quick_all_reduce_are_errors(
    quick: sums.AiterQuickCommunicator, count: int
) -> None:
    with pytest.raises(RequestError, match=r"up to 4096, not .*MAX_SIZE_BYTES_MB"):
        quick.all_reduce(torch.ones(count, dtype=torch.bfloat16))


def test_a_disabled_quick_all_reduce_names_the_setting(
    quick: sums.AiterQuickCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REGIME)
    with pytest.raises(ConfigError, match=f"{REGIME}=FP in the environment of every rank"):
        quick.open()
    quick.close()


@pytest.mark.parametrize(
    ("variables", "dtype", "num", "num_bytes", "reason"),
    [
        ({}, "float16", 2, 1 << 20, f"{REGIME} is not set. Try: {REGIME}=FP"),
        ({REGIME: "INT4"}, "float16", 2, 1 << 20, f"8 bits or fewer, .*{REGIME} is INT4"),
        ({REGIME: "FP"}, "bfloat16", 2, 2 << 20, f"ends at 65504. Try: {CAST}=0"),
        ({REGIME: "FP", CAST: "0"}, "bfloat16", 4, 4 << 20, "on 4 ranks from 8 MiB on"),
        ({REGIME: "FP"}, "float16", 6, 16 << 20, "ranks"),
        ({REGIME: "FP"}, "float16", 2, (1 << 20) + 4, "bytes"),
        ({REGIME: "FP"}, "float16", 8, 16 << 20, ""),
        ({REGIME: "FP", CAST: "0"}, "bfloat16", 4, 8 << 20, ""),
    ],
)
def test_the_quick_all_reduce_is_used_if_its_transfer_is_exact(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    dtype: str,
    num: int,
    num_bytes: int,
    reason: str,
) -> None:
    for name in (REGIME, CAST):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sums, "judge_device", lambda _: Verdict.accept())
    ranks = Ranks(0, num, (0,) * num, ("rocm",) * num)
    config = Config(communicators={"all_reduce": "aiter_quick"})
    resolver = Resolver(
        Registry(Plugins.of(plugin, ops)), MI300X, config, described=True, ranks=ranks
    )

    def choose() -> str:
        kind = getattr(torch, dtype)
        return resolver.communicator("all_reduce", kind, num_bytes, "model")[0].chosen.name

    if not reason:
        assert choose() == "aiter_quick"
        return
    with pytest.raises(NoCandidateError, match=reason):
        choose()
