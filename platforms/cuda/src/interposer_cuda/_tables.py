"""Tuning tables that this plugin ships, one file per device name.

``interposer tune --export`` writes such a file. The file name is the device's name with ``_`` for
every character other than letters, digits, ``.`` and ``-``, such as ``NVIDIA_H200.json``. To ship
another table, add the file to the folder ``tables``.
"""

from __future__ import annotations

from pathlib import Path

from interposer.records import TuningEntry

_FOLDER = "tables"


def shipped_tables(package: Path = Path(__file__).parent) -> list[TuningEntry]:
    """Return one record per table in the package; an empty list if there are no tables."""
    files = sorted((package / _FOLDER).glob("*.json"))
    return [
        TuningEntry(
            file.stem,
            # "_" stands for any replaced character, so the pattern matches any.
            file.stem.replace("_", "?"),
            f"interposer_cuda:{_FOLDER}/{file.name}",
        )
        for file in files
    ]
