"""Evaluate the shipped model and its quantized forms with lm-evaluation-harness.

python benchmarks/evaluation.py [--every N] [--documents N] [--out FILE] [--only LABEL ...]

Needs `pip install 'interposer-engine[eval]'`. The tasks are made of files of Python's standard
library that the model was never trained on, and each row is one run of `interposer eval`:

- stdlib_text: bits per byte of whole files, in windows of the model's context
- stdlib_next_line: which of four lines of a file comes next
- stdlib_rest_of_line: the end of a line, generated greedily; an exact match counts
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = Path("examples/models/stdlib-lm")

sys.path.insert(0, str(ROOT / "examples"))
import stdlib_corpus as corpus  # noqa: E402

ROWS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    **{
        f"bfloat16, {method}": ["--dtype", "bfloat16", "--quantization", method]
        for method in ("int8", "fp8", "int4", "w4a8")
    },
}
METRICS = {
    "stdlib_text": ("bits_per_byte", "byte_perplexity"),
    "stdlib_next_line": ("acc",),
    "stdlib_rest_of_line": ("exact_match",),
}
LINES_BEFORE = 12
LEAST_WORDS = 4  # of a line that is asked for; two of them begin the line to complete


def documents(files: list[Path], count: int) -> Iterator[dict[str, Any]]:
    """Yield places of the files: lines before, four lines of which one comes next, its parts."""
    draw = random.Random(0)
    places = []
    for path in files:
        lines = corpus.read_text(path).splitlines()
        asked = [i for i, line in enumerate(lines) if len(line.split()) >= LEAST_WORDS]
        if len(asked) >= 4 + LINES_BEFORE:
            places += [(lines, asked, i) for i in asked if i >= LINES_BEFORE]
    for lines, asked, i in draw.sample(places, count):
        choices = [lines[i], *(lines[k] for k in draw.sample([k for k in asked if k != i], 3))]
        right = draw.randrange(4)
        choices[0], choices[right] = choices[right], choices[0]
        before = "\n".join(lines[i - LINES_BEFORE : i])
        first, second, rest = lines[i].lstrip().split(" ", 2)
        indent = " " * (len(lines[i]) - len(lines[i].lstrip()))
        yield {
            "before": before,
            "choices": ["\n" + choice for choice in choices],
            "right": right,
            "begun": f"{before}\n{indent}{first} {second}",
            "rest": f" {rest}",
        }


def task(name: str, data: Path, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a task, which lm_eval reads from YAML; JSON is YAML."""
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "target_delimiter": "",
        "metric_list": [{"metric": metric} for metric in METRICS[name]],
        **settings,
    }


def write_tasks(folder: Path, files: list[Path], count: int) -> None:
    """Write the three tasks and their data."""
    texts, places = folder / "texts.json", folder / "places.json"
    texts.write_text(json.dumps([{"text": corpus.read_text(path)} for path in files]))
    places.write_text(json.dumps(list(documents(files, count))))
    tasks = (
        task(
            "stdlib_text",
            texts,
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
        ),
        task(
            "stdlib_next_line",
            places,
            output_type="multiple_choice",
            doc_to_text="{{before}}",
            doc_to_choice="{{choices}}",
            doc_to_target="{{right}}",
        ),
        task(
            "stdlib_rest_of_line",
            places,
            output_type="generate_until",
            doc_to_text="{{begun}}",
            doc_to_target="{{rest}}",
            generation_kwargs={"until": ["\n"], "max_gen_toks": 48},
        ),
    )
    for settings in tasks:
        (folder / f"{settings['task']}.yaml").write_text(json.dumps(settings, indent=2))


def evaluated(options: list[str], tasks: Path) -> dict[str, Any]:
    """Run ``interposer eval``, and return its metrics with their standard errors."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["eval", str(MODEL), *options, "--tasks", ",".join(METRICS)]
        paths = ["--include_path", str(tasks), "--output_path", str(Path(folder, "result.json"))]
        subprocess.run(
            [sys.executable, "-m", "interposer_tools", *command, *paths],
            cwd=ROOT,
            # Example kernels are no part of an installation.
            env={**os.environ, "INTERPOSER_DISABLE": "example-norm"},
            check=True,
        )
        (file,) = Path(folder).glob("*.json")
        found = json.loads(file.read_text())
    metrics: dict[str, Any] = {"command": f"interposer {' '.join(command)} --include_path TASKS"}
    for name, kinds in METRICS.items():
        for kind in kinds:
            metrics[kind] = found["results"][name][f"{kind},none"]
            error = found["results"][name][f"{kind}_stderr,none"]
            if isinstance(error, float):
                metrics[f"{kind}_stderr"] = error
    metrics["device"] = found["config"]["model_device"]
    metrics["kernels"] = found["config"]["model_kernels"]
    metrics["lm_eval"] = found["lm_eval_version"]
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=4, help="take every Nth held-out file")
    parser.add_argument("--documents", type=int, default=200, help="places for the other tasks")
    parser.add_argument("--only", nargs="*", help="rows by label; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/evaluation.json")
    arguments = parser.parse_args()
    # Tables of encodings resemble each other too much to say anything.
    held_out = [path for path in corpus.held_out_files() if path.parent.name != "encodings"]
    files = held_out[:: arguments.every]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), files, arguments.documents)
        for label, options in ROWS.items():
            if arguments.only is None or label in arguments.only:
                rows[label] = evaluated(options, Path(folder))
                print(label, rows[label], flush=True)
    facts = {
        "command": f"python benchmarks/evaluation.py {' '.join(sys.argv[1:])}".rstrip(),
        "model": str(MODEL),
        "data": f"{len(files)} files of the standard library of Python "
        f"{sys.version.split()[0]}, all held out from training",
        "bytes": sum(path.stat().st_size for path in files),
        "documents": arguments.documents,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
