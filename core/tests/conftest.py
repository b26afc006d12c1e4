"""Plugins made in code, and a policy that neither the machine nor the checkout touches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import importlib_metadata
import pytest

from interposer.hookspecs import GROUP, hookimpl
from interposer.plugins import Plugins, discover
from interposer.records import Record
from interposer.registry import Registry


@pytest.fixture(autouse=True)
def _no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in os.environ:
        if variable.startswith("INTERPOSER_"):
            monkeypatch.delenv(variable)


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
def discovered() -> Callable[..., Plugins]:
    """Return a discovery that finds the given modules only, whatever is installed."""

    def find(*modules: ModuleType, disabled: frozenset[str] = frozenset()) -> Plugins:
        installed = {point.name for point in importlib_metadata.entry_points(group=GROUP)}
        return discover(disabled | installed, modules)

    return find


@pytest.fixture
def registered(
    make_plugin: Callable[..., ModuleType], discovered: Callable[..., Plugins]
) -> Callable[..., Registry]:
    """Return a maker of registries with one plugin, ``acme``, of the given records."""
    return lambda *records, **hooks: Registry(discovered(make_plugin("acme", *records, **hooks)))
