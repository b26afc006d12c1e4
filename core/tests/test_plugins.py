"""Plugins are found and taken apart; a broken one is quarantined and the rest works."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import ModuleType
from typing import Any

import pytest

from interposer import Candidate, Choice, Kernel, LayerEntry, OpEntry, Request, hookimpl
from interposer._contract.verdict import Refusal
from interposer._plugins.acceptance import acceptance_of
from interposer._plugins.plugins import Plugins, PluginWarning
from interposer.errors import PluginConflictError, PluginError

Make = Callable[..., ModuleType]

OP = OpEntry("linear", "acme.ops:linear")
KERNEL = Kernel("linear", "linear_fast", "acme.kernels:fast")


def module(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def test_a_plugin_is_loaded_with_its_records(make_plugin: Make) -> None:
    plugins = Plugins.of(make_plugin("acme", OP, KERNEL))
    (plugin,) = plugins.loaded
    assert (plugin.name, plugin.distribution, plugin.version) == ("acme", "acme", "in code")
    assert plugin.records == (OP, KERNEL)
    assert plugin.summary() == {"OpEntry": 1, "Kernel": 1}
    assert plugins.failed == []


def test_a_plugin_without_records_is_loaded() -> None:
    observer = module("quiet", interposer_failed=hookimpl(lambda reason: None))
    plugins = Plugins.of(observer)
    assert [(plugin.records, plugin.hooks) for plugin in plugins.loaded] == [
        ((), ("interposer_failed",))
    ]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (module("broken"), "it has no hook, such as interposer_records"),
        (
            module("broken", interposer_records=lambda: [OP]),
            "interposer_records is not marked with @hookimpl",
        ),
        (
            module("broken", interposer_failed=hookimpl(wrapper=True)(lambda: (yield))),
            "interposer_failed is a wrapper",
        ),
    ],
)
def test_hooks_that_are_never_called_are_refused(broken: ModuleType, reason: str) -> None:
    with pytest.warns(PluginWarning, match=reason):
        assert Plugins.of(broken).loaded == []


def test_records_may_be_yielded() -> None:
    @hookimpl
    def interposer_records() -> Iterator[OpEntry]:
        yield OP

    plugins = Plugins.of(module("acme", interposer_records=interposer_records))
    assert plugins.loaded[0].records == (OP,)


def test_order_of_discovery_does_not_matter(make_plugin: Make) -> None:
    modules = [make_plugin("b", KERNEL), make_plugin("a", OP), make_plugin("c")]
    assert [plugin.name for plugin in Plugins.of(*modules).loaded] == ["a", "b", "c"]
    assert [plugin.name for plugin in Plugins.of(*reversed(modules)).loaded] == ["a", "b", "c"]


def raising(*_: object) -> Any:
    raise RuntimeError("broken on purpose")


def leaving() -> None:
    raise SystemExit(3)


def yielding_then_raising() -> Iterator[OpEntry]:
    yield OP
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(
    ("hooks", "reason", "has_traceback"),
    [
        ({"interposer_records": raising}, "interposer_records raised RuntimeError", True),
        ({"interposer_records": leaving}, r"interposer_records raised SystemExit\(3\)", True),
        ({"interposer_records": yielding_then_raising}, "raised RuntimeError", True),
        ({"interposer_records": lambda: 3}, "interposer_records returned int, must return", True),
        (
            {"interposer_records": lambda: [OP, "x"]},
            "declares a 'str', which is not a record",
            False,
        ),
        ({"interposer_records": lambda: [OpEntry]}, "declares a 'type', which is not a rec", False),
        ({"interposer_records": lambda: [KERNEL, OP, KERNEL]}, "declares Kernel linear lin", False),
        (
            {"interposer_recrods": lambda: [OP]},
            "not valid: there is no hook .*; nearest: interposer_rec",
            False,
        ),
        ({"interposer_selected": lambda choise: None}, "not valid: .*'choise'", False),
    ],
)
def test_a_broken_plugin_is_quarantined_and_its_neighbour_works(
    hooks: dict[str, Callable[..., object]],
    reason: str,
    has_traceback: bool,
    make_plugin: Make,
) -> None:
    broken = module("broken", **{name: hookimpl(function) for name, function in hooks.items()})
    with pytest.warns(PluginWarning, match=f"(?s)Plugin 'broken' of broken in code: .*{reason}"):
        plugins = Plugins.of(make_plugin("a", OP), broken, make_plugin("z", KERNEL))
    assert [plugin.name for plugin in plugins.loaded] == ["a", "z"]
    (failure,) = plugins.failed
    assert (failure.name, failure.distribution) == ("broken", "broken")
    assert isinstance(failure.error, PluginError)
    assert "INTERPOSER_DISABLE=broken" in failure.error.mend
    assert failure.traceback.startswith("Traceback") is has_traceback


def test_two_plugins_with_one_name_are_both_refused(make_plugin: Make) -> None:
    with pytest.warns(PluginWarning, match="claimed by acme in code, acme in code") as warned:
        plugins = Plugins.of(make_plugin("acme", OP), make_plugin("acme"), make_plugin("fine"))
    assert [plugin.name for plugin in plugins.loaded] == ["fine"]
    assert [failure.name for failure in plugins.failed] == ["acme", "acme"]
    assert all(isinstance(failure.error, PluginConflictError) for failure in plugins.failed)
    assert len(warned) == 2
    assert {warning.filename for warning in warned} == {__file__}


def test_observers_receive_the_facts_that_they_request(make_plugin: Make) -> None:
    observed: list[object] = []
    plugins = Plugins.of(
        make_plugin("a", interposer_failed=lambda reason: observed.append(reason)),
        make_plugin(
            "b", interposer_failed=lambda reason, plugin: observed.append((plugin, reason))
        ),
    )
    plugins.observe("interposer_failed", plugin="x", distribution="y", reason="z")
    assert sorted(observed, key=str) == [("x", "z"), "z"]


@pytest.mark.parametrize("name", ["a_broken", "z_broken"])
def test_observers_are_notified_of_earlier_and_later_failures(name: str, make_plugin: Make) -> None:
    observed: list[str] = []
    observer = make_plugin("observer", interposer_failed=lambda plugin: observed.append(plugin))
    with pytest.warns(PluginWarning):
        Plugins.of(observer, module(name, interposer_recrods=hookimpl(raising)))
    assert observed == [name]


def test_an_observer_that_raises_is_quarantined_and_the_others_are_notified(
    make_plugin: Make,
) -> None:
    observed: list[str] = []
    plugins = Plugins.of(
        make_plugin("a", KERNEL, interposer_selected=raising),
        make_plugin("b", interposer_selected=lambda choice: observed.append(choice)),
    )
    with pytest.warns(PluginWarning, match="Plugin 'a' of a in code: its observer"):
        plugins.observe("interposer_selected", choice="first")
    plugins.observe("interposer_selected", choice="second")
    assert observed == ["first", "second"]
    (failure,) = plugins.failed
    assert (failure.name, failure.version) == ("a", "in code")
    assert "broken on purpose" in failure.traceback
    assert KERNEL in plugins.loaded[0].records


def test_an_observer_that_raises_in_several_threads_fails_once(make_plugin: Make) -> None:
    barrier = Barrier(4)

    def raise_together(choice: object) -> None:
        barrier.wait()
        raise ValueError(choice)

    plugins = Plugins.of(make_plugin("a", interposer_selected=raise_together))
    with ThreadPoolExecutor(4) as pool, pytest.warns(PluginWarning):
        list(pool.map(lambda n: plugins.observe("interposer_selected", choice=n), range(4)))
    assert [failure.name for failure in plugins.failed] == ["a"]


def test_observers_of_failures_that_fail_do_not_break_the_caller(make_plugin: Make) -> None:
    plugins = Plugins.of(
        make_plugin("a", interposer_failed=raising), make_plugin("b", interposer_failed=raising)
    )
    with pytest.warns(PluginWarning):
        plugins.observe("interposer_failed", plugin="x", distribution="y", reason="z")
    assert sorted(failure.name for failure in plugins.failed) == ["a", "b"]


def test_records_of_one_distribution_are_distinguished_by_name(make_plugin: Make) -> None:
    kernels = [Kernel("linear", "x", "a:b"), Kernel("embedding", "x", "a:b")]
    layers = [LayerEntry("linear", "x", "a:b"), LayerEntry("embedding", "x", "a:b")]
    assert len(Plugins.of(make_plugin("acme", *kernels, *layers)).loaded[0].records) == 4


REFUSAL = Refusal("slow", "acme-kernels 1.2", "needs avx2")


def changed_dims(choice: Choice) -> None:
    choice.request.dims["size"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [
        changed_dims,
        lambda choice: object.__setattr__(choice.refusals[0], "reason", "mine"),
        lambda choice: object.__setattr__(choice.chosen.record, "target", "mine:kernel"),
        lambda choice: object.__setattr__(choice.request.capability, "features", frozenset("x")),
    ],
)
def test_an_observer_that_changes_a_part_of_a_choice_is_quarantined(
    change: Callable[[Choice], None], make_plugin: Make
) -> None:
    acceptance = acceptance_of(KERNEL)
    chosen = Candidate(KERNEL.name, "acme-kernels", "1.2", 10.0, KERNEL, acceptance)
    choice = Choice(Request("kernel", "scale", dims={"size": 1}), chosen, "score", (REFUSAL,))
    original = copy.deepcopy(choice)
    plugins = Plugins.of(make_plugin("a", interposer_selected=lambda choice: change(choice)))
    with pytest.warns(PluginWarning, match="changes the choice that it receives"):
        plugins.observe("interposer_selected", choice=choice)
    assert choice == original
    assert plugins.failed
