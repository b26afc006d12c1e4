"""Records of the standard ops and kernels in a JSON file that is read without importing torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from interposer.records import Kernel, OpEntry
from interposer.requires import Dim, Requires

PLAIN = frozenset({"deterministic", "graph_safe", "traceable"})
"""Properties of every reference: it consists of torch operators and never waits for a value."""

RECORDS = Path(__file__).with_name("_records.json")


def read_records() -> list[OpEntry | Kernel]:
    """Read the records from ``_records.json``."""
    return [_read(row) for row in json.loads(RECORDS.read_text(encoding="utf-8"))]


def triton_kernels() -> list[Kernel]:
    """Return the records of all kernels that require the feature "triton"."""
    kernels = (record for record in read_records() if isinstance(record, Kernel))
    return [kernel for kernel in kernels if "triton" in kernel.requires.features]


def records_text(records: Iterable[OpEntry | Kernel]) -> str:
    """Serialize records as the text of ``_records.json``, one record a line."""
    rows = ",\n".join(json.dumps(_row(record)) for record in records)
    return f"[\n{rows}\n]\n"


def _row(record: OpEntry | Kernel) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults, as JSON values."""
    row: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Requires):
            value = {k: _plain(v) for k, v in _changed(asdict(value), asdict(Requires())).items()}
        # An empty ``proven_on`` is kept: unlike None, it declares the kernel unproven everywhere.
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
