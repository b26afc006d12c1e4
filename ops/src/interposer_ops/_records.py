"""The records of standard ops and kernels as a file, which the plugin reads without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from interposer.records import Kernel, OpEntry
from interposer.requires import Dim, Requires

PLAIN = frozenset({"deterministic", "graph_safe", "traceable"})
"""The promises of every reference: it is made of torch's operators, and waits for no value."""

RECORDS = Path(__file__).with_name("_records.json")


def read_records() -> list[OpEntry | Kernel]:
    """Return the records as they were written."""
    return [_read(row) for row in json.loads(RECORDS.read_text(encoding="utf-8"))]


def triton_kernels() -> list[Kernel]:
    """Return the records of the Triton kernels."""
    kernels = (record for record in read_records() if isinstance(record, Kernel))
    return [kernel for kernel in kernels if "triton" in kernel.requires.features]


def records_text(records: Iterable[OpEntry | Kernel]) -> str:
    """Return the text of the file, one record a line."""
    rows = ",\n".join(json.dumps(_row(record)) for record in records)
    return f"[\n{rows}\n]\n"


def _row(record: OpEntry | Kernel) -> dict[str, Any]:
    """Return what differs from the defaults, as plain data."""
    row: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Requires):
            value = {k: _plain(v) for k, v in _changed(asdict(value), asdict(Requires())).items()}
        if value != field.default and (value or field.name == "proven_on"):
            row[field.name] = _plain(value)
    return row


def _changed(value: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in value.items() if part != default[name]}


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items() if part not in (None, ())}
    return list(value) if isinstance(value, tuple) else value


def _read(row: dict[str, Any]) -> OpEntry | Kernel:
    row["properties"] = frozenset(row.get("properties", ()))
    if "proven_on" in row:
        row["proven_on"] = frozenset(row["proven_on"])
    if "op" not in row:
        return OpEntry(**row)
    needs = row.pop("requires", {})
    requires = Requires(
        features=frozenset(needs.get("features", ())),
        dtypes=tuple(needs.get("dtypes", ())),
        dims={name: _dim(bounds) for name, bounds in needs.get("dims", {}).items()},
    )
    return Kernel(**row, requires=requires)


def _dim(bounds: dict[str, Any]) -> Dim:
    return Dim(**bounds | {"one_of": tuple(bounds.get("one_of", ()))})
