"""The summary of a run: one line for each step, and a line with the totals."""

from __future__ import annotations

from collections.abc import Sequence

from evidence.ledger import Entry, Ledger
from evidence.stage import Stage

__all__ = ["summary"]

_WORDS = {
    "held": "passed",
    "faults": "FAULTS",
    "cut": "partial",
    "failed": "FAILED",
    "killed": "TIMEOUT",
}
_WIDTH = 160


def summary(stages: Sequence[Stage], ledger: Ledger, tiny: bool) -> str:
    """Return a line per step, and a line with the totals, which also marks a rehearsal."""
    found = [(stage, step, ledger.entry(step.name)) for stage in stages for step in stage.steps]
    lines = [
        f"{stage.letter} {step.name:17}{_told(entry)}"
        for stage, step, entry in found
        if entry is not None or not tiny or step.tiny or len(stage.steps) == 1
    ]
    entries = [entry for _, _, entry in found if entry is not None]
    held = sum(entry.state in ("held", "cut") for entry in entries)
    spent = sum(entry.seconds for entry in entries)
    missing = len(lines) - len(entries)
    lines.append(
        f"{held} of {len(entries)} steps passed in {spent:.0f} s"
        + (f", {missing} were not run" if missing else "")
        + ("; a rehearsal, whose times mean nothing" if tiny else "")
    )
    return "\n".join(lines) + "\n"


def _told(entry: Entry | None) -> str:
    if entry is None:
        return "not run"
    more = []
    if entry.faults:
        more.append(f"{len(entry.faults)} faults, the first: {entry.faults[0]}")
    if entry.skipped:
        more.append(f"{len(entry.skipped)} parts skipped")
    text = f"{_WORDS[entry.state]:9}{entry.seconds:>5.0f} s  {entry.headline}"
    text = "; ".join([text, *more])
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
