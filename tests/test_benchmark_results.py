"""The index of the benchmark results lists every file of results."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_the_table_of_results_lists_every_file() -> None:
    table = (RESULTS / "README.md").read_text(encoding="utf-8").split("\n## Files\n")[1]
    names = re.findall(r"`([^`]+\.txt)`", table.split("\n## ")[0])
    # ``SHAPE`` stands for the name of a model shape.
    patterns = [name.replace("SHAPE", "*") for name in names]
    unlisted = [
        file.name
        for file in sorted(RESULTS.glob("*.txt"))
        if not any(fnmatch(file.name, pattern) for pattern in patterns)
    ]
    assert unlisted == [], "add a row to benchmarks/results/README.md"
