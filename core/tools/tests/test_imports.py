"""Imports of a command run without garbage collection, and their objects are never collected."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from interposer_tools.imports import frozen_imports


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the garbage collector of the test's process."""
    was_enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was_enabled else gc.disable)()


def test_collection_is_paused_inside_the_block_only() -> None:
    gc.enable()
    with frozen_imports():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_paused_collector_stays_paused() -> None:
    gc.disable()
    with frozen_imports():
        pass
    assert not gc.isenabled()


def test_objects_of_the_block_are_exempt_from_collections() -> None:
    kept: list[list[int]] = []
    with frozen_imports():
        kept.append([])
    assert not any(found is kept[0] for found in gc.get_objects())
    assert gc.get_freeze_count()


def test_an_error_in_the_block_freezes_nothing() -> None:
    gc.enable()
    gc.unfreeze()
    with pytest.raises(ModuleNotFoundError), frozen_imports():
        import acme_missing  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    assert not gc.get_freeze_count()


@pytest.mark.process
def test_a_command_runs_with_garbage_collection() -> None:
    program = (
        "import gc\n"
        "from interposer_tools import _program\n"
        "from interposer_tools._cli import main\n"
        "def application(arguments):\n"
        "    return lambda: print(gc.isenabled(), gc.get_freeze_count() > 0)\n"
        "_program._application = application\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "True True\n"
