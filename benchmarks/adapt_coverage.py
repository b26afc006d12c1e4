"""Adapt a tiny random model of every architecture of transformers, and write the table of it.

python benchmarks/adapt_coverage.py [MODEL_TYPE ...] [--dtype bfloat16] [--rows FILE] [--table FILE]

Each architecture is judged in a process of its own. With --rows, rows are kept as they come, and
those that a file holds already are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from interposer_adapt import adapt
from tiny_models.building import model_classes
from tiny_models.judge import Row, judge, judge_apart
from tiny_models.table import Summary, render

WARMING = ("llama", "bert")


def rows(types: list[str], dtype: torch.dtype, kept: dict[str, Row]) -> Iterator[Row]:
    """Yield the row of each type, without another trial of those that are kept."""
    classes = model_classes()
    for model_type in WARMING:  # imports what all of them do, and has plugins examined, once
        judge(model_type, classes[model_type], adapt)
    for model_type in types or classes:
        if model_type not in kept:
            yield judge_apart(model_type, classes[model_type], adapt, dtype)


def main() -> None:
    """Print a row a line, unless they go into a file, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type", nargs="*")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--table", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kept: dict[str, Row] = {}
    if chosen.rows and chosen.rows.exists():
        lines = chosen.rows.read_text(encoding="utf-8").splitlines()
        kept = {row.model_type: row for row in (Row(**json.loads(line)) for line in lines)}
    out = chosen.rows.open("a", encoding="utf-8") if chosen.rows else sys.stdout
    for row in rows(chosen.model_type, getattr(torch, chosen.dtype), kept):
        print(json.dumps(row.as_dict()), file=out, flush=True)
        kept[row.model_type] = row
    for line in Summary.of(kept.values()).lines():
        print(line, file=sys.stderr)
    if chosen.table:
        names = ("transformers", "torch", "interposer-models")
        versions = {name: version(name) for name in names} | {"dtype": chosen.dtype}
        chosen.table.write_text(render(kept.values(), versions), encoding="utf-8")


if __name__ == "__main__":
    main()
