"""Bring evidence home: results under the device's name, and its table into the plugin.

    python benchmarks/gpu_results.py ARCHIVE_OR_FOLDER [...]

Later ones replace the steps that they have in common with earlier ones. A rehearsal is refused,
since its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from evidence.ledger import Ledger
from evidence.record import file_name
from evidence.stages import STAGES
from evidence.summary import summary

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("found", type=Path, nargs="+")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--platforms", type=Path, default=ROOT / "platforms")
    options = parser.parse_args()
    for found in options.found:
        with tempfile.TemporaryDirectory() as unpacked:
            folder = found
            if found.is_file():
                folder = Path(unpacked)
                with tarfile.open(found) as archive:
                    archive.extractall(folder, filter="data")
            print(f"{found}: {bring(folder, options.results, options.platforms)}")


def bring(folder: Path, results: Path, platforms: Path) -> str:
    """Copy the results of a folder to their places; return where they are."""
    entries = [read(file) for file in sorted(folder.glob("*.json"))]
    steps = [entry for entry in entries if "record" in entry]
    if not steps:
        sys.exit(f"{folder} has no results. Try: what gpu_evidence.py wrote by --out or --archive")
    if any(step["tiny"] for step in steps):
        sys.exit(f"{folder} is of a rehearsal, whose figures say nothing")
    devices = {step["record"].get("facts", {}).get("device") for step in steps} - {None}
    if len(devices) != 1:
        sys.exit(f"{folder} has results of {sorted(devices) or 'no device'}, must be of one")
    home = results / file_name(devices.pop())
    home.mkdir(parents=True, exist_ok=True)
    for step in steps:
        for suffix in (".json", ".txt"):
            file = folder / f"{step['step']}{suffix}"
            if file.is_file():
                shutil.copy(file, home)
    (home / "summary.txt").write_text(summary(STAGES, Ledger(home), False), encoding="utf-8")
    told = [str(home)]
    for step in steps:
        facts = step["record"].get("facts", {})
        if table := facts.get("table"):
            told.append(str(shipped(folder / table, facts["platform"], platforms)))
    return ", ".join(told)


def shipped(table: Path, platform: str, platforms: Path) -> Path:
    """Merge a table into that of the platform's plugin, and return the plugin's file."""
    from interposer_tools import Table

    folder = platforms / platform / "src" / f"interposer_{platform}" / "tables"
    folder.mkdir(exist_ok=True)
    file = folder / table.name.replace(".table", "")
    found = Table.read(table)
    if file.is_file():
        found, _ = Table.read(file).merge(found)
    found.write(file)
    return file


def read(file: Path) -> dict[str, Any]:
    facts = json.loads(file.read_text(encoding="utf-8"))
    return facts if isinstance(facts, dict) else {}


if __name__ == "__main__":
    main()
