"""Run the tests that need a GPU, until they are done or the time is.

    python benchmarks/gpu_tests.py [--json FILE] [PYTEST_ARGUMENT ...]

Only files with such tests are collected, so that nothing else has to be importable.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evidence.record import Deadline, Record, add_step_options

ROOT = Path(__file__).resolve().parents[1]
# Written so that this file, and a test of it, are none of those that it finds.
_MARK = "pytest.mark." + "gpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that contains the tests")
    parser.add_argument("--under", default="", help="run only the tests of this subfolder")
    add_step_options(parser)
    options = parser.parse_args()
    record = Record(options.json)
    watcher = Watcher(record, Deadline(options.seconds))
    os.chdir(options.root)
    # A folder that cannot be written is no reason to fail, and neither are warnings of a torch
    # that is not the one of these tests.
    quiet = ("-p", "no:cacheprovider", "-q", "-W", "default")
    chosen = ("-m", "gpu", *options.arguments)
    found = [f for f in files(options.root) if f.is_relative_to(options.root / options.under)]
    if options.tiny:
        # Those of ops are as many as ops, and are collected for half a minute.
        found = [file for file in found if not file.is_relative_to(options.root / "ops")]
    status = pytest.main([*quiet, *chosen, *map(str, found)], plugins=[watcher])
    counts = watcher.counts
    told = ", ".join(f"{counts[word]} {word}" for word in sorted(counts)) or "none was run"
    record.facts["status"] = int(status)
    record.headline = f"of {watcher.collected} tests {told}"
    if status not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.INTERRUPTED,
    ):
        record.faults.append(f"pytest ended with {status!r}")
    if not counts["passed"] and not record.faults:
        record.skipped.append("no test ran here")
    record.say(record.headline)


def files(root: Path) -> Iterator[Path]:
    """Yield the files with tests that need a GPU; those of platforms, which are few, go first."""
    found = [
        file
        for file in root.glob("**/tests/**/test_*.py")
        if ".venv" not in file.parts and _MARK in file.read_text(encoding="utf-8")
    ]
    yield from sorted(found, key=lambda file: ("platforms" not in file.parts, file))


class Watcher:
    """A plugin of pytest that records each test and ends the session in time."""

    def __init__(self, record: Record, deadline: Deadline) -> None:
        self.record = record
        self.deadline = deadline
        self.collected = 0
        self.counts: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.record.fault(f"{report.nodeid} cannot be collected: {_last(report.longrepr)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        if report.failed:
            self.record.fault(f"{report.nodeid}: {_last(report.longrepr)}")
        self.record.row(test=report.nodeid, outcome=report.outcome, seconds=report.duration)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.deadline.left_s() > 0:
            return
        left = self.collected - sum(self.counts.values())
        if left and not self.record.skipped:
            self.record.skip(f"no time for {left} more tests, those after {nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self.deadline.left_s() > 0:
            return None
        item.session.shouldstop = "the time is over"
        return True


def _last(told: Any) -> str:
    lines = [line for line in str(told).splitlines() if line.strip()]
    raised = [line for line in lines if line.startswith("E ")]
    return (raised or lines or [""])[-1].removeprefix("E").strip()[:300]


if __name__ == "__main__":
    main()
