"""A plugin can be added in code, is checked as an installed one, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.waiting import WAIT_SECONDS

from interposer import (
    Case,
    Device,
    Kernel,
    LayerEntry,
    OpEntry,
    PlatformEntry,
    PluggableLayer,
    Site,
    Verdict,
    current_registry,
    custom_op,
    hookimpl,
    register,
)
from interposer._contract.platform import Platform
from interposer._plugins import registry
from interposer.errors import PluginConflictError, PluginError

Make = Callable[..., ModuleType]


def no_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield from ()


@custom_op("acme_double", cases=no_cases)
def double(x: torch.Tensor) -> torch.Tensor:
    """Return ``2 x``."""
    return x + x


@custom_op("rms_norm", cases=no_cases)
def norm(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, which is not what everybody else means by it."""
    return x.clone()


class Standard(PluggableLayer):
    layer_id = "acme_layer"

    def __init__(self, site: Site, size: int) -> None:
        super().__init__(site)


class Wider(Standard):
    def __init__(self, site: Site, size: int, more: int = 0) -> None:
        super().__init__(site, size)


class Halved(Platform):
    name = "acme_host"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept()

    def devices(self) -> list[Device]:
        return []


OP = OpEntry("acme_double", f"{__name__}:double")
FAST = Kernel("acme_double", "acme_fast", f"{__name__}:double")


def test_a_registered_plugin_is_in_the_current_registry(make_plugin: Make) -> None:
    before = current_registry()
    with register(make_plugin("acme", OP, FAST)) as registration:
        registry = current_registry()
        assert [c.name for c in registry.candidates("kernel", "acme_double")] == [
            "reference",
            "acme_fast",
        ]
        assert registry is current_registry()
        assert "acme" in repr(registration)
        names = {plugin.name for plugin in registry.plugins.loaded}
        assert names == {"acme", *(plugin.name for plugin in before.plugins.loaded)}
    assert "acme_double" not in current_registry().ops


def test_plugins_can_be_removed_twice_and_in_any_order(make_plugin: Make) -> None:
    first, second = register(make_plugin("one", OP)), register(make_plugin("two"))
    first.remove()
    first.remove()
    loaded = [plugin.name for plugin in current_registry().plugins.loaded]
    assert "two" in loaded
    assert "one" not in loaded
    second.remove()


def test_a_removed_plugin_leaves_no_trace_in_memory(make_plugin: Make) -> None:
    plugin = make_plugin("acme", OP, FAST)
    with register(plugin):
        current_registry()
    trace = weakref.ref(plugin)
    del plugin
    gc.collect()
    assert trace() is None


def test_observers_registered_in_code_are_notified_until_they_are_removed(
    make_plugin: Make,
) -> None:
    events: list[str] = []
    watcher = make_plugin("watcher", interposer_failed=lambda reason: events.append(reason))
    with register(watcher):
        current_registry().plugins.observe(
            "interposer_failed", plugin="x", distribution="y", reason="first"
        )
    current_registry().plugins.observe(
        "interposer_failed", plugin="x", distribution="y", reason="second"
    )
    assert events == ["first"]


def test_an_object_can_be_a_plugin() -> None:
    class Plugin:
        @hookimpl
        def interposer_records(self) -> list[Kernel]:
            return [FAST]

    with register(Plugin()), register(Plugin(), name="other") as second:
        assert second.source.name == "other"


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ((Kernel("acme_double", "acme_fast", f"{__name__}:duoble"),), "nearest: double"),
        ((Kernel("acme_double", "acme_fast", "acme_of_nowhere:x"),), "acme_of_nowhere"),
        ((OP, OP), "twice"),
        ((LayerEntry("acme_layer", "wider", f"{__name__}:Wider"),), "more: 'int' = 0"),
        ((LayerEntry("other_layer", "wider", f"{__name__}:Wider"),), "other_layer"),
        ((PlatformEntry("acme_host", f"{__name__}:Halved"),), "capability, dtypes"),
        ((PlatformEntry("acme", f"{__name__}:double"),), "Platform"),
    ],
)
def test_an_unusable_plugin_is_refused_at_once(
    records: tuple[OpEntry, ...], reason: str, make_plugin: Make
) -> None:
    with pytest.raises(PluginError) as caught:
        register(make_plugin("acme", *records))
    assert reason in str(caught.value)
    assert str(caught.value).startswith("Plugin 'acme' of acme in code: ")
    assert "\nTry: " in str(caught.value)
    assert "acme" not in {plugin.name for plugin in current_registry().plugins.loaded}


def test_a_stated_api_range_is_checked() -> None:
    with pytest.raises(PluginError, match="built for the plugin API >=9"):
        register(SimpleNamespace(__name__="acme", INTERPOSER_API=">=9"))


def test_a_taken_name_is_refused(make_plugin: Make) -> None:
    with register(make_plugin("acme")), pytest.raises(PluginConflictError, match="name=\\.\\.\\."):
        register(make_plugin("acme"))
    with register(make_plugin("ops")), pytest.raises(PluginConflictError, match="interposer-ops"):
        current_registry()
    current_registry()


@pytest.mark.parametrize("name", ["cpu", "interposer-cpu", "interposer-ops", "interposer"])
def test_the_name_of_an_installed_plugin_cannot_be_registered(name: str, make_plugin: Make) -> None:
    with (
        pytest.raises(PluginConflictError, match=f"the name '{name}' is taken"),
        register(make_plugin("acme"), name=name),
    ):
        current_registry()


def test_an_op_cannot_be_defined_twice(make_plugin: Make) -> None:
    again = make_plugin("acme", OpEntry("rms_norm", f"{__name__}:norm"))
    with register(again), pytest.raises(PluginConflictError, match="'rms_norm' is defined by int"):
        current_registry()
    with register(make_plugin("one", OP)), pytest.raises(PluginConflictError, match="by one in"):
        register(make_plugin("two", OP))


def test_run_time_failures_outlive_plugins_added_in_code(make_plugin: Make) -> None:
    candidate = current_registry().candidates("kernel", "rms_norm")[0]
    failures = current_registry().blame(candidate).failures
    failures["some/kernel"] = "failed"
    try:
        with register(make_plugin("acme", OP)):
            assert current_registry().blame(candidate).failures is failures
            added = current_registry().candidates("kernel", "acme_double")[0]
            assert current_registry().blame(added).failures == {}
        assert current_registry().blame(candidate).failures is failures
    finally:
        del failures["some/kernel"]


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_during_a_registration_can_register(make_plugin: Make) -> None:
    with registry._lock.held:
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(WAIT_SECONDS))  # ends a child that waits
            register(make_plugin("acme"))
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_concurrent_registrations_lose_nothing(make_plugin: Make) -> None:
    plugins = [make_plugin(f"acme_{number}") for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        registered = list(pool.map(register, plugins))
    names = {plugin.name for plugin in current_registry().plugins.loaded}
    assert names >= {plugin.__name__ for plugin in plugins}
    for added in registered:
        added.remove()
    plugin_names = {plugin.name for plugin in current_registry().plugins.loaded}
    assert plugin_names.isdisjoint(plugin.__name__ for plugin in plugins)
