"""The ledger: what came of each step, in files of one folder, and all of it in an archive."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from evidence.process import Ended

__all__ = ["Entry", "Ledger", "State"]

State = Literal["held", "faults", "cut", "failed", "killed"]
"""Everything held; something did not; all that ran held, but not all did; the program raised; it
passed its limit."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The end of one step, with the record that its program left."""

    step: str
    state: State
    seconds: float
    processor_s: float
    limit_s: int
    date: str
    tiny: bool
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """Return the sentence of the program, or what there is instead."""
        return str(self.record.get("headline", "")) or "left no result"

    @property
    def faults(self) -> list[str]:
        """Return the sentences on what did not hold."""
        return list(self.record.get("faults", []))

    @property
    def skipped(self) -> list[str]:
        """Return the sentences on what was left out."""
        return list(self.record.get("skipped", []))


class Ledger:
    """The results in a folder: per step ``STEP.json`` and what it printed, ``STEP.txt``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, step: str) -> Path:
        """Return the file for what a step prints."""
        return self.folder / f"{step}.txt"

    def record(self, step: str) -> Path:
        """Return the file that the program of a step writes its record to."""
        return self.folder / f"{step}.record.json"

    def begin(self, step: str) -> None:
        """Forget what came of a step before."""
        for file in (self._entry(step), self.record(step), self.log(step)):
            file.unlink(missing_ok=True)

    def end(self, step: str, ended: Ended, limit_s: int, date: str, tiny: bool) -> Entry:
        """Keep what came of a step, and return it."""
        file = self.record(step)
        record = _read(file)
        state = _state(ended, record)
        seconds = round(ended.seconds, 1), round(ended.processor_s, 1)
        entry = Entry(step, state, *seconds, limit_s, date, tiny, record)
        text = json.dumps(asdict(entry), indent=1) + "\n"
        self._entry(step).write_text(text, encoding="utf-8")
        file.unlink(missing_ok=True)
        return entry

    def entry(self, step: str) -> Entry | None:
        """Return the entry of a step; None if it was not run, or by another version of this."""
        try:
            return Entry(**_read(self._entry(step)))
        except TypeError:
            return None

    def archive(self, file: Path) -> None:
        """Write everything into one compressed file, in place of what was there."""
        beside = file.with_suffix(".part")
        with tarfile.open(beside, "w:gz") as archive:
            for path in self._files():
                archive.add(path, path.name)
        beside.replace(file)

    def _files(self) -> Iterator[Path]:
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".json", ".txt") and path.is_file():
                yield path

    def _entry(self, step: str) -> Path:
        return self.folder / f"{step}.json"


def _state(ended: Ended, record: dict[str, Any]) -> State:
    if ended.status is None:
        return "killed"
    if record.get("faults"):
        return "faults"
    if ended.status:
        return "failed"
    return "cut" if record.get("skipped") else "held"


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
