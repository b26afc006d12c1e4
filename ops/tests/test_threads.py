from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from interposer import Platform, Verdict
from interposer.errors import ConfigError
from interposer_ops.devices import threads
from interposer_ops.devices.threads import bind_threads


class Machine:
    """Two nodes of two cores of two logical processors each."""

    def __init__(self, *members: str) -> None:
        self.members = members or ("cores", "numa_nodes", "bind_threads")
        self.bound: list[int] = []

    def provides(self, member: str) -> Verdict:
        return Verdict.accept() if member in self.members else Verdict.refuse(f"no {member}")

    def cores(self) -> Sequence[Sequence[int]]:
        return [[2, 6], [0, 4], [1, 5], [3, 7]]

    def numa_nodes(self) -> Mapping[int, Sequence[int]]:
        return {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}

    def bind_threads(self, processors: Sequence[int]) -> Verdict:
        self.bound = list(processors)
        return Verdict.accept(f"bound to {self.bound}")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return use(Machine(), monkeypatch)


def use(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(threads, "place", lambda config: SimpleNamespace(platform=machine))
    return machine


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"siblings": True}, [0, 4, 1, 5, 2, 6, 3, 7]),
        ({"reserve": 1}, [1, 2, 3]),
        ({"node": 1}, [2, 3]),
        ({"node": 1, "reserve": 1, "siblings": True}, [3, 7]),
    ],
)
def test_one_thread_per_core_is_bound(
    machine: Machine, settings: dict[str, int], expected: list[int]
) -> None:
    verdict = bind_threads(**settings)  # type: ignore[arg-type]
    assert verdict.reason == f"bound to {expected}"
    assert machine.bound == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reserve": -1}, "reserve is -1"),
        ({"reserve": "1"}, "reserve is '1'"),
        ({"reserve": 4}, "may use 4 cores. Try: reserve=3"),
        ({"node": 1, "reserve": 2}, "may use 2 cores of node 1. Try: reserve=1"),
        ({"node": 7}, "no NUMA node 7. This machine has: 0, 1"),
    ],
)
def test_invalid_arguments_raise(machine: Machine, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind_threads(**settings)  # type: ignore[arg-type]
    assert machine.bound == []


def test_a_platform_without_thread_binding_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    use(Machine("bind_threads"), monkeypatch)
    assert bind_threads().reason == "no cores"
    use(Machine("cores", "bind_threads"), monkeypatch)
    with pytest.raises(ConfigError, match="This machine has: none"):
        bind_threads(node=0)


def test_the_members_that_are_asked_for_exist() -> None:
    assert {"cores", "numa_nodes", "bind_threads"} <= {*Platform.optional_members()}
