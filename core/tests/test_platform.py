"""A platform says which optional members it provides, and using another raises."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from interposer import Capability, Device, Platform, Verdict
from interposer._contract.platform import NumericsPolicy
from interposer.errors import InterposerError, MissingMemberError

CAPABILITY = Capability("any")


class Bare(Platform):
    name = "bare"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept()

    def devices(self) -> Sequence[Device]:
        return [Device("bare", "cpu", "a device", CAPABILITY)]

    def capability(self, device: str) -> Capability:
        return CAPABILITY

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return (torch.float32,)


class Threaded(Bare):
    def num_threads(self) -> int:
        return 3


CALLS = {
    "stream": ("cpu",),
    "capture_graph": (lambda: None,),
    "pin_memory": (torch.zeros(1),),
    "map_host_memory": (torch.zeros(1),),
    "peak_memory_bytes": ("cpu",),
    "memory_profile": ("cpu",),
    "numa_nodes": (),
    "cores": (),
    "bind_threads": ([0],),
    "num_threads": (),
    "start_method": (),
    "facts": (),
    "distributed_backend": (),
    "compile_backend": (),
    "default_kernels": (),
}


def test_every_optional_member_is_tested_here() -> None:
    assert set(Platform.optional_members()) == set(CALLS)


@pytest.mark.parametrize("member", CALLS)
def test_a_missing_member_raises_and_provides_says_so(member: str) -> None:
    with pytest.raises(MissingMemberError, match=f"'bare' does not provide '{member}'") as caught:
        getattr(Bare(), member)(*CALLS[member])
    assert f"provides('{member}')" in str(caught.value)
    assert isinstance(caught.value, InterposerError)
    assert isinstance(caught.value, NotImplementedError)
    verdict = Bare.provides(member)
    assert not verdict
    assert verdict.reason == f"platform 'bare' does not provide '{member}'"


def test_a_provided_member_is_accepted() -> None:
    assert Threaded.provides("num_threads")
    assert Threaded().num_threads() == 3
    assert not Threaded.provides("numa_nodes")


@pytest.mark.parametrize("member", ["num_thread", "probe", "devices", "provides", "__init__"])
def test_an_unknown_optional_member_is_refused_with_the_known_ones(member: str) -> None:
    verdict = Bare.provides(member)
    assert not verdict
    assert f"'{member}' is not an optional member" in verdict.reason
    assert "num_threads" in verdict.reason


def test_an_unknown_member_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        Bare().graph_pool  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("member", ["probe", "devices", "capability", "dtypes"])
def test_required_members_are_abstract(member: str) -> None:
    incomplete = type("Incomplete", (Bare,), {member: getattr(Platform, member)})
    with pytest.raises(TypeError, match=member):
        incomplete()


@pytest.mark.parametrize("member", ["memory", "synchronize"])
def test_a_default_that_torch_does_not_support_names_the_member(
    member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: str) -> None:
        raise RuntimeError("no accelerator of that type")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", fail)
    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    with pytest.raises(MissingMemberError) as caught:
        getattr(Bare(), member)("cpu")
    assert str(caught.value) == (
        f"Platform 'bare' does not override {member!r}, and torch.accelerator cannot do it for "
        f"'cpu': no accelerator of that type. Try: override {member!r}"
    )


def test_numerics_need_no_override() -> None:
    with Bare().numerics(NumericsPolicy("high")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_seeding_makes_random_numbers_repeat() -> None:
    Bare().seed(3)
    first = torch.rand(4)
    Bare().seed(3)
    assert torch.equal(first, torch.rand(4))
