"""Sites whose resolver knows the standard ops and layers, and nothing else that is installed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from interposer import Capability, Config, Device, Registry, Resolver, Site
from interposer.plugins import Plugin, Plugins
from interposer.records import Record
from interposer_ops.plugin import interposer_records

CPU = Device("cpu", "cpu", "test", Capability("x86_64"))

MakeSite = Callable[..., Site]


@pytest.fixture
def make_site() -> MakeSite:
    """Return a maker of sites: a prefix, a dtype, records beside the standard ones."""

    def make(prefix: str, dtype: torch.dtype, *records: Record) -> Site:
        plugins = Plugins()
        plugins.loaded += [
            Plugin("ops", "interposer-ops", "1", tuple(interposer_records())),
            Plugin("test", "test", "1", records),
        ]
        return Site(Resolver(Registry(plugins), CPU, Config()), prefix, dtype)

    return make
