"""A pytest plugin that records which lines of the product each test executes.

``MUTANTS_RECORD`` names the folder that coverage's data files and the tests' durations go to. The
lines that a fixture of a module or the session executes count for every test of that module, as
they run in the setup of the first test alone. Child processes are measured where
``tests.mutants.child`` is imported at their start, see ``mutants.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ["MUTANTS_RECORD"])


class Recorder:
    """Switches coverage's context to the running test, and writes a line per finished test."""

    def __init__(self) -> None:
        from coverage import Coverage

        self.coverage = Coverage(
            data_file=str(FOLDER / ".coverage"),
            data_suffix=True,
            config_file=str(ROOT / "tests" / "mutants" / "coverage.toml"),
        )
        self.coverage.start()
        self.durations: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(f"{item.nodeid}|setup")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(f"{item.nodeid}|call")
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        nodeid = report.nodeid
        self.durations[nodeid] = self.durations.get(nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        path = FOLDER / f"durations-{os.getpid()}.json"
        path.write_text(json.dumps(self.durations), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    # With xdist, only the workers run tests.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        FOLDER.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Recorder(), "mutants-recorder")
