"""Where to run: asked for, or chosen; never a silent second best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from interposer import (
    Capability,
    Config,
    Device,
    Platform,
    PlatformEntry,
    Verdict,
    current_platform,
    hookimpl,
    place,
    use,
)
from interposer._plugins.plugins import Plugins, PluginWarning
from interposer._plugins.registry import Registry
from interposer._selection import placement as placement_module
from interposer.errors import ConfigError, PlatformUnavailableError, UnknownNameError

Make = Callable[..., ModuleType]


class Host(Platform):
    name = "host"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept()

    def devices(self) -> Sequence[Device]:
        return [Device(self.name, "cpu", "a device", Capability("any"))]

    def capability(self, device: str) -> Capability:
        return Capability("any")

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return (torch.float32,)


class Absent(Host):
    name = "absent"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.refuse("no such device")


class Broken(Host):
    name = "broken"

    @classmethod
    def probe(cls) -> Verdict:
        raise OSError("driver too old")


class Undecided(Host):
    name = "undecided"

    @classmethod
    def probe(cls) -> Verdict:
        return False  # type: ignore[return-value]


class Empty(Host):
    name = "empty"

    def devices(self) -> Sequence[Device]:
        return []


class Unbuilt(Host):
    name = "unbuilt"

    def __init__(self) -> None:
        raise OSError("no permission")


def entry(platform: type[Platform], score: float = 10.0) -> PlatformEntry:
    return PlatformEntry(platform.name, f"{__name__}:{platform.__name__}", score)


@pytest.fixture
def installed(make_plugin: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the given platforms and plugins the installed ones."""

    def install(*entries: PlatformEntry, plugins: Sequence[ModuleType] = ()) -> None:
        registry = Registry(Plugins.of(make_plugin("acme", *entries), *plugins))
        monkeypatch.setattr(placement_module, "current_registry", lambda _: registry)

    return install


Install = Callable[..., None]


def test_the_best_accepting_platform_is_chosen_with_its_first_device(installed: Install) -> None:
    installed(entry(Host, 0.0), entry(Absent, 20.0))
    placement = place()
    assert type(placement.platform) is Host
    assert placement.device.name == "a device"
    assert placement.choice.why == "the only one accepted"
    assert [str(r) for r in placement.choice.refusals] == ["absent (acme in code): no such device"]
    assert current_platform() is placement.platform


def test_torch_is_not_queried_while_every_plugin_works(
    installed: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = []

    def current_accelerator(check_available: bool = False) -> None:
        queries.append(check_available)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    installed(entry(Host, 0.0), entry(Absent, 20.0))
    assert place().platform.name == "host"
    assert queries == []


def test_repeated_calls_return_the_same_platform(installed: Install) -> None:
    installed(entry(Host))
    assert place() is place()
    assert place(Config(platform="host")).platform is place(Config(platform="host")).platform


def test_without_any_platform_the_error_names_the_package_to_install(installed: Install) -> None:
    installed()
    with pytest.raises(PlatformUnavailableError) as caught:
        current_platform()
    assert str(caught.value) == (
        "No platform.\n  No installed plugin declares one.\n"
        "Try: pip install --find-links dist interposer-cpu (`make wheels` builds dist; see "
        "docs/install.md)"
    )


def test_if_every_platform_refuses_the_error_lists_reasons_and_the_next_action(
    installed: Install,
) -> None:
    installed(entry(Absent))
    with pytest.raises(PlatformUnavailableError) as caught:
        current_platform()
    assert str(caught.value).startswith("No usable platform.\n  absent (acme in code): no such dev")
    assert "interposer doctor" in caught.value.action


def test_failed_plugins_are_among_the_reasons(installed: Install) -> None:
    @hookimpl
    def interposer_records() -> None:
        raise RuntimeError("broken on purpose")

    broken = ModuleType("accelerator")
    broken.interposer_records = interposer_records  # type: ignore[attr-defined]
    with pytest.warns(PluginWarning):
        installed(entry(Absent), plugins=[broken])
    with pytest.raises(PlatformUnavailableError, match=r"accelerator .*broken on purpose"):
        current_platform()
    with pytest.raises(PlatformUnavailableError) as caught:
        current_platform(Config(platform="tpu"))
    assert str(caught.value).startswith(
        "No platform 'tpu'; known, nearest first: 'absent'.\n  accelerator ("
    )


@pytest.mark.parametrize("better", [Broken, Undecided])
@pytest.mark.parametrize("score", [10.0, 20.0])
def test_a_better_platform_whose_probe_fails_is_not_skipped(
    better: type[Platform], score: float, installed: Install
) -> None:
    installed(entry(Host, 10.0), entry(better, score))
    with pytest.raises(PlatformUnavailableError) as caught:
        current_platform()
    assert "'host' would be a silent fallback" in str(caught.value)
    (failure,) = caught.value.refusals
    assert failure.candidate == better.name
    assert failure.traceback
    assert "INTERPOSER_PLATFORM=host" in caught.value.action
    assert type(current_platform(Config(platform="host"))) is Host


def test_a_worse_platform_whose_probe_fails_is_ignored(installed: Install) -> None:
    installed(entry(Host, 10.0), entry(Broken, 0.0))
    placement = place()
    assert type(placement.platform) is Host
    assert "driver too old" in placement.choice.refusals[0].reason


def test_a_platform_with_a_missing_target_is_not_skipped(installed: Install) -> None:
    installed(entry(Host, 10.0), PlatformEntry("tpu", "acme_of_nowhere:Tpu", 20.0))
    with pytest.raises(PlatformUnavailableError, match="No module named 'acme_of_nowhere'"):
        current_platform()


@pytest.mark.parametrize(("chosen", "reason"), [(Empty, "IndexError"), (Unbuilt, "no permission")])
def test_a_platform_that_accepts_but_cannot_be_opened_raises(
    chosen: type[Platform], reason: str, installed: Install
) -> None:
    installed(entry(Host, 10.0), entry(chosen, 20.0))
    with pytest.raises(PlatformUnavailableError, match=reason) as caught:
        current_platform()
    assert str(caught.value).startswith(f"No device on platform '{chosen.name}'.")
    assert caught.value.refusals[0].traceback


def test_the_pinned_platform_comes_from_argument_context_or_environment(
    installed: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(entry(Host, 0.0), entry(Empty, 20.0))
    assert type(current_platform(Config(platform="host"))) is Host
    with use(platform="host"):
        assert type(current_platform()) is Host
    monkeypatch.setenv("INTERPOSER_PLATFORM", "host")
    Config.refresh()
    assert place().choice.why == "pinned by the configuration"


def test_the_pinned_platform_is_never_replaced(installed: Install) -> None:
    installed(entry(Host), entry(Absent))
    with pytest.raises(PlatformUnavailableError) as caught:
        current_platform(Config(platform="absent"))
    assert str(caught.value) == (
        "No platform 'absent', which was requested.\n"
        "  absent (acme in code): no such device\n"
        "Try: remove the pin; accepted here: 'host'"
    )


class Simulator(Host):
    name = "simulator"


class Unasked(Host):
    name = "unasked"

    @classmethod
    def probe(cls) -> Verdict:
        raise AssertionError("it was probed, though nobody named it")


def explicit(platform: type[Platform]) -> PlatformEntry:
    return replace(entry(platform, 90.0), explicit=True)


def test_an_explicit_platform_is_neither_chosen_nor_probed_unless_named(
    installed: Install,
) -> None:
    installed(entry(Host, 0.0), explicit(Unasked))
    placement = place()
    assert type(placement.platform) is Host
    assert placement.choice.why == "the only one accepted"
    assert [str(r) for r in placement.choice.refusals] == [
        "unasked (acme in code): is used only if you name it: Config(platform='unasked')"
    ]
    with pytest.raises(PlatformUnavailableError, match="it was probed"):
        place(Config(platform="unasked"))


@pytest.mark.parametrize("name", ["simulator", "acme/simulator"])
def test_an_explicit_platform_is_chosen_if_named(name: str, installed: Install) -> None:
    installed(entry(Host), explicit(Simulator))
    assert type(place(Config(platform=name)).platform) is Simulator
    assert type(place(Config(platform="host")).platform) is Host


def test_an_explicit_platform_is_no_fallback(installed: Install) -> None:
    installed(entry(Absent), explicit(Simulator))
    with pytest.raises(PlatformUnavailableError, match=r"simulator .*only if you name it"):
        place()


def test_an_unknown_platform_lists_the_known(installed: Install) -> None:
    installed(entry(Host), entry(Absent))
    with pytest.raises(UnknownNameError, match=r"'hots'\. .* first: 'host', 'absent'"):
        current_platform(Config(platform="hots"))


def test_a_platform_of_the_sdk_that_is_missing_names_its_package(installed: Install) -> None:
    installed(entry(Host))
    with pytest.raises(UnknownNameError, match=r"Try: pip install .* interposer-cuda"):
        current_platform(Config(platform="cuda"))


def test_a_mistake_in_the_environment_raises(
    installed: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(entry(Host))
    monkeypatch.setenv("INTERPOSER_PLATFROM", "host")
    with pytest.raises(ConfigError, match="INTERPOSER_PLATFROM"):
        Config.refresh()
    with pytest.raises(ConfigError, match="INTERPOSER_PLATFROM"):
        current_platform()
