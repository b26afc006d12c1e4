"""The tables of measurements that this plugin ships, each for the devices of one name.

A table is a file of ``tables``, as ``interposer tune --export`` writes it, named like the device
that it was measured on with ``_`` for whatever is no letter, digit, ``.`` or ``-``:
``NVIDIA_H200.json``. So a table is added by adding its file.
"""

from __future__ import annotations

from pathlib import Path

from interposer.records import TuningEntry

_FOLDER = "tables"


def shipped_tables(package: Path = Path(__file__).parent) -> list[TuningEntry]:
    """Return a record for each table in the package; where none was measured, there is none."""
    files = sorted((package / _FOLDER).glob("*.json"))
    return [
        TuningEntry(
            file.stem,
            # Whatever stands in the place of a "_" matches.
            file.stem.replace("_", "?"),
            f"interposer_cuda:{_FOLDER}/{file.name}",
        )
        for file in files
    ]
