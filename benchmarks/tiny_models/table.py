"""The table of all architectures: a summary, a line for each, and the reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiny_models.judge import Row
from tiny_models.modules import KINDS

NOT_RUN = "not run"
_COLUMNS = ("model type", "class", "status", "called with", *KINDS, "deviation", "allowed")
_REASON = "  # "


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a table.

    Attributes:
        types: model types that transformers knows.
        run: those that eager runs.
        adapted: those of them that were adapted, agree within the bound and were given back.
        bound, instances: counted modules of those that run, by kind.
    """

    types: int
    run: int
    adapted: int
    bound: Mapping[str, int]
    instances: Mapping[str, int]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Summary:
        """Return the figures of rows."""
        rows = list(rows)
        run = [row for row in rows if row.status != NOT_RUN]
        return cls(
            len(rows),
            len(run),
            sum(row.status == "adapted" for row in run),
            {kind: sum(row.bound_modules.get(kind, 0) for row in run) for kind in KINDS},
            {kind: sum(row.modules.get(kind, 0) for row in run) for kind in KINDS},
        )

    def share(self, kind: str) -> float:
        """Return the share of a kind's instances that are bound, in per cent."""
        return 100 * self.bound[kind] / max(self.instances[kind], 1)

    def lines(self) -> Iterator[str]:
        """Yield the figures in words."""
        yield f"{self.types} model types, {self.run} of which run as tiny random models"
        yield f"{self.adapted} of {self.run} adapted: within the bound, and given back bit for bit"
        for kind in KINDS:
            bound, instances = self.bound[kind], self.instances[kind]
            yield f"{bound} of {instances} {kind} instances bound ({self.share(kind):.1f} %)"


def render(rows: Iterable[Row], versions: Mapping[str, str]) -> str:
    """Return the table as text, which ``parse`` reads."""
    rows = sorted(rows, key=lambda row: row.model_type)
    head = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [head, "", *Summary.of(rows).lines(), ""]
    cells = [_COLUMNS, *(_cells(row) for row in rows if row.status != NOT_RUN)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(_COLUMNS))]
    for line in cells:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append(padded.rstrip())
    failed = [row for row in rows if row.status not in ("adapted", NOT_RUN)]
    lines += ["", "Reasons of what is not adapted:", ""]
    lines += [f"{row.model_type}{_REASON}{row.status}: {_first(row.reason)}" for row in failed]
    lines += ["", "Left as they were, instances by reason:", ""]
    unbound: Counter[str] = Counter()
    for row in rows:
        unbound.update(row.unbound)
    lines += [f"{count:5d}  {reason}" for reason, count in unbound.most_common()]
    lines += ["", "Not run, with what the last attempt met:", ""]
    for row in rows:
        if row.status == NOT_RUN:
            lines.append(f"{row.model_type}  {row.class_name}{_REASON}{_first(row.reason)}")
    return "\n".join(lines) + "\n"


def parse(text: str) -> list[dict[str, Any]]:
    """Return the lines of a table: type, class, status, and the counts of what was run."""
    found: list[dict[str, Any]] = []
    _, _, rest = text.partition(f"\n{_COLUMNS[0]}  ")
    table, _, not_run = rest.partition("Not run, with what the last attempt met:")
    for line in table.partition("\n\n")[0].splitlines()[1:]:
        cells = re.split(r"\s{2,}", line)
        counts = [[int(number) for number in cell.split("/")] for cell in cells[4:7]]
        found.append(
            {
                "model_type": cells[0],
                "class_name": cells[1],
                "status": cells[2],
                "bound_modules": {k: c[0] for k, c in zip(KINDS, counts, strict=True)},
                "modules": {k: c[1] for k, c in zip(KINDS, counts, strict=True)},
            }
        )
    for line in not_run.strip().splitlines():
        model_type, class_name = line.partition(_REASON)[0].split()
        found.append({"model_type": model_type, "class_name": class_name, "status": NOT_RUN})
    return found


def _cells(row: Row) -> tuple[str, ...]:
    counts = (f"{row.bound_modules.get(k, 0)}/{row.modules.get(k, 0)}" for k in KINDS)
    return (
        row.model_type,
        row.class_name,
        row.status,
        row.call,
        *counts,
        f"{row.deviation:.1e}",
        f"{row.bound:.1e}",
    )


def _first(reason: str) -> str:
    """Return the first of the attempts' reasons, in one line."""
    return reason.partition("\n")[0][:220]
