"""Settings of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from tests import landing, tiers
from tests.commands import Command
from tqdm import tqdm

from interposer import Config, Registry, hookimpl, use
from interposer.records import Record
from interposer.tooling import Plugins

# Collecting the tests imports all libraries, and leaves almost no garbage.
gc.disable()

# A landing must not depend on examples that nobody has seen before, so they are the same in each
# run; `make test-all` draws others and prints the seed. A deadline per example, and a limit on the
# time to draw one, fail on a busy machine and say nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
_UNTIMED = settings.get_profile("untimed")
settings.register_profile("landing", _UNTIMED, max_examples=10, derandomize=True)
settings.register_profile("random", _UNTIMED, derandomize=False, print_blob=True)
settings.load_profile("landing")

# Ranks meet on this machine. Without a network, gloo takes 20 seconds to find that out by itself.
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# A progress bar starts a thread that never ends; what all threads share is compared without others.
tqdm.monitor_interval = 0

# The user's own verdicts and measurements stay out of the tests, and the other way round. Kept from
# one run to the next, so that examining what is installed does not cost every run its seconds.
_CACHE = (
    Path(__file__).parent
    / ".pytest_cache"
    / f"interposer-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
)
os.environ["INTERPOSER_CACHE_DIR"] = str(_CACHE)

# Verdicts on what is installed are the same for all workers.
_VERDICTS = _CACHE.with_name("interposer-verdicts")
_VERDICTS.mkdir(parents=True, exist_ok=True)
_CACHE.mkdir(exist_ok=True)
with contextlib.suppress(FileExistsError):
    (_CACHE / "verdicts").symlink_to(_VERDICTS)


# Examining plugins in a child process is a promise of the core with tests of its own; quick tests
# start no process, so what is installed runs unexamined there. The file stands for the user's.
_QUICK_POLICY = _CACHE.with_name("interposer-quick-policy")
_DEFAULT_POLICY = _CACHE.with_name("interposer-default-policy")
_FILE = _QUICK_POLICY / "interposer" / "config.toml"
_FILE.parent.mkdir(parents=True, exist_ok=True)
if not _FILE.exists():  # another run may be reading it
    _FILE.write_text('isolation = "off"\n', encoding="utf-8")
os.environ["XDG_CONFIG_HOME"] = str(_QUICK_POLICY)


def pytest_configure(config: pytest.Config) -> None:
    """Hold the border between the tiers."""
    config.pluginmanager.register(tiers)


@pytest.hookimpl(tryfirst=True)  # before xdist starts its workers
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let everything that starts a process once do so before any test runs."""
    platform.platform()  # runs `uname -p` and keeps the answer; the doctor reports the platform
    if not hasattr(session.config, "workerinput"):
        from interposer import place  # which imports torch

        with use(isolation="process", probe_seconds=60):  # of a machine that may be busy
            place()


@pytest.hookimpl(tryfirst=True)  # before fixtures, those of a module too
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test the policy of its tier."""
    folder = str(_QUICK_POLICY if tiers.is_quick(item) else _DEFAULT_POLICY)
    if os.environ["XDG_CONFIG_HOME"] != folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        Config.refresh()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook as well
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run a module, unless it has groups of its own; slow tests go one by one.

    With every event xdist counts anew what is left of all groups that a worker has had, and a
    fixture of a module is set up by each worker that runs a part of it.
    """
    landing.mark_slow(items)
    for item in items:
        if item.name.endswith("-lightness]"):  # of the conformance kit: it imports in a process
            item.add_marker(pytest.mark.process)
        if not any(item.iter_markers("xdist_group")) and not any(item.iter_markers("slow")):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting the collected tests, again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _garbage() -> Iterator[None]:
    """Collect the garbage of a module, so that what it left open is reported as its fault.

    What is left is frozen: some tests collect garbage themselves, which takes seconds once all
    libraries are loaded.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_measured() -> None:
    """Start without measurements, which change what is chosen."""
    shutil.rmtree(_CACHE / "measurements", ignore_errors=True)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Call ``interposer`` with arguments."""
    return Command(monkeypatch, capsys)


@pytest.fixture
def no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let neither the machine nor the checkout touch the policy."""
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
