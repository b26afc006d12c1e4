"""Sites whose resolver knows the standard ops and layers, and nothing else that is installed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from interposer import Capability, Config, Device, Registry, Resolver, Site
from interposer.hookspecs import hookimpl
from interposer.records import Record
from interposer.tooling import Plugins
from interposer_ops import plugin

CPU = Device("cpu", "cpu", "test", Capability("x86_64"))

MakeSite = Callable[..., Site]


@pytest.fixture
def make_site() -> MakeSite:
    """Return a maker of sites: a prefix, a dtype, records beside the standard ones."""

    def make(prefix: str, dtype: torch.dtype, *records: Record) -> Site:
        test = SimpleNamespace(__name__="test", interposer_records=hookimpl(lambda: records))
        # The kernels of these tests need not compute what the ops define.
        resolver = Resolver(Registry(Plugins.of(plugin, test)), CPU, Config(canary="off"))
        return Site(resolver, prefix, dtype)

    return make
