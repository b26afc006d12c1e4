"""Plugins made in code, and a policy that neither the machine nor the checkout touches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from interposer import Config
from interposer._plugins.plugins import Plugins
from interposer._plugins.registry import Registry
from interposer.hookspecs import hookimpl
from interposer.records import Record


@pytest.fixture(autouse=True)
def _no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for variable in os.environ:
        if variable.startswith("INTERPOSER_") and variable != "INTERPOSER_CACHE_DIR":
            monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    Config.refresh()
    yield
    monkeypatch.undo()
    Config.refresh()


@pytest.fixture
def make_plugin() -> Callable[..., ModuleType]:
    """Return a maker of plugin modules: a name, records, further hooks by name."""

    def make(name: str, *records: Record, **hooks: Callable[..., object]) -> ModuleType:
        module = ModuleType(name)
        module.interposer_records = hookimpl(lambda: records)  # type: ignore[attr-defined]
        for hook, function in hooks.items():
            setattr(module, hook, hookimpl(function))
        return module

    return make


@pytest.fixture
def registered(make_plugin: Callable[..., ModuleType]) -> Callable[..., Registry]:
    """Return a maker of registries with one plugin, ``acme``, of the given records."""
    return lambda *records, **hooks: Registry(Plugins.of(make_plugin("acme", *records, **hooks)))
