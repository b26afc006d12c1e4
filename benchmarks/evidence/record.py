"""The record of a step: what it found, written whenever it grows, and the time that it has."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Deadline", "Record", "add_step_options", "file_name"]


class Deadline:
    """The end of the time that a program has; without a limit it never passes."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._end = time.monotonic() + seconds if seconds else float("inf")

    def left_s(self) -> float:
        """Return the seconds until the end, infinity without a limit."""
        return self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Return whether what takes ``seconds`` would be done in time."""
        return self.left_s() > seconds


class Record:
    """The findings of a step so far.

    Attributes:
        headline: the one sentence of the summary.
        facts: what holds for all rows.
        rows: the figures, one dictionary each.
        faults: sentences on what did not hold.
        skipped: what was left out as time was short, or as it cannot be here.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.headline = ""
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.skipped: list[str] = []
        self._file = file

    def row(self, text: str = "", **figures: Any) -> None:
        """Add a row, print it as ``text``, and write the record."""
        self.rows.append(figures)
        self.say(text)

    def fault(self, text: str) -> None:
        """Add what did not hold, print it, and write the record."""
        self.faults.append(text)
        self.say(f"fault: {text}")

    def skip(self, text: str) -> None:
        """Add what was left out, print it, and write the record."""
        self.skipped.append(text)
        self.say(f"skipped: {text}")

    def say(self, text: str = "") -> None:
        """Print a line, if there is any, and write the record."""
        if text:
            print(text, flush=True)
        self.write()

    def write(self) -> None:
        """Write everything to the file, in one piece, so that whoever is killed left the last."""
        if self._file is None:
            return
        facts = {
            "headline": self.headline,
            "faults": self.faults,
            "skipped": self.skipped,
            "facts": self.facts,
            "rows": self.rows,
        }
        beside = self._file.with_suffix(".part")
        beside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._file)

    def within(
        self, items: Sequence[Any], deadline: Deadline, named: str, least_s: float = 0.0
    ) -> Iterator[Any]:
        """Yield the items that there is time for; the others are said to be left out.

        Args:
            named: what an item is, as ``"op"``.
            least_s: seconds that an item takes at least, or as long as the longest before it.
        """
        longest = least_s
        for place, item in enumerate(items):
            if not deadline.allows(longest):
                left = ", ".join(str(other) for other in items[place:])
                self.skip(f"no time for {len(items) - place} more {named}: {left}")
                return
            start = time.monotonic()
            yield item
            longest = max(longest, time.monotonic() - start)

    @contextmanager
    def guarded(self, subject: str) -> Iterator[None]:
        """Return a block whose exception is a fault of ``subject``, so that others still run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told, and the next one may work
            first = (str(error).splitlines() or [""])[0]
            self.fault(f"{subject}: {type(error).__name__}: {first[:300]}")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every program of a step has."""
    parser.add_argument(
        "--platform", default="", help="platform to run on; default: selected automatically"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many seconds")
    parser.add_argument("--tiny", action="store_true", help="rehearse with small sizes")


def file_name(device: str) -> str:
    """Return the name of a device as a file's: whatever is no letter or digit becomes ``_``."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", device)
