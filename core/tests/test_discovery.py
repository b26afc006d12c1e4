"""Installed plugins are found whatever else is installed; who lies about a name gains nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from importlib_metadata import EntryPoint

from interposer import Config
from interposer._plugins.discovery import discover, installed_distributions
from interposer._plugins.plugins import Failure, Plugins, PluginWarning
from interposer._plugins.trust import Lock
from interposer.errors import LockError

Install = Callable[..., Path]
POINTS = "[interposer.plugins]\nmodels = interposer_models_module\n"
PLUGIN = """
from interposer.hookspecs import hookimpl
INTERPOSER_API = ">=1.0,<2"
@hookimpl
def interposer_failed(reason):
    pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts a distribution on the path, with its entry points and code."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def make(folder: str, name: str, points: str | bytes, source: str = PLUGIN) -> Path:
        metadata = site / folder
        metadata.mkdir()
        kind = "METADATA" if folder.endswith(".dist-info") else "PKG-INFO"
        (metadata / kind).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        content = points if isinstance(points, bytes) else points.encode()
        (metadata / "entry_points.txt").write_bytes(content)
        module = site / f"{folder.partition('-')[0].partition('.')[0]}_module.py"
        module.write_text(source)
        return module

    return make


def found(config: Config | None = None) -> Plugins:
    return discover(config or Config(isolation="off"))


def warned() -> list[Failure]:
    with pytest.warns(PluginWarning):
        return found().failed


def names(plugins: Plugins) -> set[str]:
    return {plugin.name for plugin in plugins.loaded}


def test_a_plugin_on_the_path_is_found(install: Install) -> None:
    install("acme-1.0.dist-info", "acme", "[interposer.plugins]\nacme = acme_module\n")
    assert names(found()) >= {"acme", "ops"}


@pytest.mark.parametrize(
    "points", ["[console_scripts]\nfoo\n", b"[console_scripts]\nx = y:\xff\xfe\n", "foo\n"]
)
def test_unreadable_entry_points_without_plugins_are_ignored(
    points: str | bytes, install: Install
) -> None:
    install("other-1.0.dist-info", "other", points)
    plugins = found()
    assert "ops" in names(plugins)
    assert plugins.failed == []


def test_unreadable_entry_points_of_plugins_are_a_failure(install: Install) -> None:
    install("acme-1.0.dist-info", "acme", "[interposer.plugins]\nfoo\n")
    with pytest.warns(PluginWarning, match=r"of acme 1\.0: its entry_points\.txt cannot be read"):
        plugins = found()
    assert "ops" in names(plugins)
    assert [failure.distribution for failure in plugins.failed] == ["acme"]


def test_entry_points_that_are_not_utf8_are_a_failure(install: Install) -> None:
    install("acme-1.0.dist-info", "acme", b"[interposer.plugins]\nfoo = acme_module\xff\n")
    reasons = [failure.error.reason for failure in warned()]
    assert reasons == ["its entry_points.txt is not UTF-8"]


@pytest.mark.parametrize("claimed", ["interposer-ops", "interposer-cpu"])
@pytest.mark.parametrize("folder", ["evil.egg-info", "evil-1.0.dist-info"])
def test_a_plugin_cannot_take_the_name_of_another(
    folder: str, claimed: str, install: Install
) -> None:
    ran = "import builtins\nbuiltins.acme_ran = True\n"
    install(folder, claimed, "[interposer.plugins]\nevil = evil_module\n", ran + PLUGIN)
    with pytest.warns(PluginWarning, match="though it is installed as 'evil'"):
        plugins = found()
    assert "evil" not in names(plugins)
    assert not hasattr(__builtins__, "acme_ran")


@pytest.mark.process
def test_a_plugin_with_a_name_of_the_sdk_is_examined(install: Install, tmp_path: Path) -> None:
    ends = "import os\nos._exit(3)\n"
    install("interposer_models-9.dist-info", "interposer-models", POINTS, ends)
    with pytest.warns(PluginWarning):
        plugins = found(Config(cache_dir=str(tmp_path / "cache")))
    reasons = {failure.name: failure.error.reason for failure in plugins.failed}
    assert "exited with code 3 while importing interposer_models_module" in reasons["models"]
    twins = "two distributions of the name 'interposer-models' on the path: 1.0 in"
    assert twins in reasons["interposer-models"]
    assert "ops" in names(plugins)


def test_endless_entry_points_are_one_refusal_and_are_not_parsed(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"p{number} = acme_module\n" for number in range(100_000))
    install("acme-1.0.dist-info", "acme", f"[interposer.plugins]\n{lines}")
    parsed_values: list[str] = []
    construct = EntryPoint.__init__

    def note_and_construct(point: EntryPoint, name: str, value: str, group: str) -> None:
        parsed_values.append(value)
        construct(point, name, value, group)

    monkeypatch.setattr(EntryPoint, "__init__", note_and_construct)
    (broken,) = (failure for failure in warned() if failure.distribution == "acme")
    assert parsed_values
    assert "acme_module" not in parsed_values
    assert "characters; 100,000 are allowed" in broken.error.reason


def test_a_lock_distinguishes_distributions_of_one_name(install: Install) -> None:
    lock = Lock.of(installed_distributions())
    lock.check(installed_distributions())
    install("evil.egg-info", "interposer-cpu", "[interposer.plugins]\nevil = evil_module\n")
    with pytest.raises(LockError):
        lock.check(installed_distributions())
