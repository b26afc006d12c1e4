"""A pytest plugin that records when each test ran, into the folder ``MUTANTS_RECORD``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Recorder:
    """Writes the start and the end of each test, seconds since the epoch, at the end of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._intervals: list[tuple[str, float, float]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start = time.time()
        try:
            return (yield)
        finally:
            self._intervals.append((item.nodeid, start, time.time()))

    def pytest_sessionfinish(self) -> None:
        path = self._folder / f"intervals-{os.getpid()}.json"
        path.write_text(json.dumps(self._intervals), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    # With xdist, only the workers run tests.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        folder = Path(os.environ["MUTANTS_RECORD"])
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Recorder(folder), "mutants-recorder")
