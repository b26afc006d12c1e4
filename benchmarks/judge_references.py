"""Judge the reference of each task as a solution: the judge must accept it.

    python benchmarks/judge_references.py [--quick] [--kernelbench FOLDER] [--json FILE] [NAME ...]

Without ``--kernelbench``, the tasks are the ops of all installed distributions. FOLDER holds
problems of KernelBench, for example ``KernelBench/level1`` of a clone. Their inputs take gigabytes,
so a copy of each problem is judged, in which every constant above ``--largest`` is halved until it
is below.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from evidence.record import Deadline, Record
from interposer import current_registry
from interposer.errors import ConfigError
from interposer_testing import judge, read_solution, read_task

_OP = """\
from interposer.records import load_target

reference = load_target({target!r}).reference


def run(*args, **kwargs):
    return reference(*args, **kwargs)
"""
_PROBLEM = """\


class ModelNew(Model):
    pass
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="judge only these tasks")
    parser.add_argument("--quick", action="store_true", help="use the time limits of a quick run")
    parser.add_argument("--kernelbench", type=Path, metavar="FOLDER", help="problems to judge")
    parser.add_argument("--largest", type=int, default=128, help="largest constant of a problem")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    options = parser.parse_args()
    record = Record(options.json)
    with TemporaryDirectory() as folder:
        written = _problems(options, Path(folder)) if options.kernelbench else _ops(Path(folder))
        chosen = [name for name in written if not options.names or name in options.names]
        for name in record.within(chosen, Deadline(), "tasks"):
            with record.guarded(name):
                _judge(name, written[name], options.quick, record)
    accepted = sum(row["state"] == "accepted" for row in record.rows)
    record.headline = f"{accepted} of {len(record.rows)} references are accepted"
    record.say(record.headline)


def _ops(folder: Path) -> dict[str, Callable[[], tuple[str, str]]]:
    """Return functions that write a solution per op, and return the names of task and solution."""

    def write(name: str) -> tuple[str, str]:
        file = folder / f"{name}.py"
        file.write_text(_OP.format(target=current_registry().ops[name].target), encoding="utf-8")
        return name, f"{file}:run"

    return {name: partial(write, name) for name in sorted(current_registry().ops)}


def _problems(
    options: argparse.Namespace, folder: Path
) -> dict[str, Callable[[], tuple[str, str]]]:
    """Return functions that write a smaller copy of a problem, and its solution."""

    def write(path: Path) -> tuple[str, str]:
        source = _smaller(path.read_text(encoding="utf-8"), options.largest)
        task, solution = folder / path.name, folder / f"solution_{path.name}"
        task.write_text(source, encoding="utf-8")
        solution.write_text(source + _PROBLEM, encoding="utf-8")
        return str(task), str(solution)

    paths = sorted(options.kernelbench.glob("*.py"), key=lambda p: int(p.stem.partition("_")[0]))
    return {path.stem: partial(write, path) for path in paths}


def _smaller(source: str, largest: int) -> str:
    """Halve every constant at the top level of a file until it is at most ``largest``."""
    tree = ast.parse(source)
    constants = [statement.value for statement in tree.body if isinstance(statement, ast.Assign)]
    for constant in constants:
        for node in ast.walk(constant):
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                while node.value > largest:
                    node.value //= 2
    return ast.unparse(tree)


def _judge(name: str, write: Callable[[], tuple[str, str]], quick: bool, record: Record) -> None:
    task_text, solution_text = write()
    try:
        task = read_task(task_text)
        verdict = judge(task, read_solution(solution_text, task), quick=quick)
    except ConfigError as error:
        record.skip(f"{name}: {error}")
        return
    finding = str(verdict.findings[0]) if verdict.findings else ""
    text = f"{name:48}{verdict.state:11}{verdict.seconds:>6.1f} s  {finding[:100]}"
    record.row(
        text, task=name, state=verdict.state, seconds=round(verdict.seconds, 1), finding=finding
    )
    if verdict.state != "accepted":
        record.fault(f"{name}: {verdict.state}. {finding}")


if __name__ == "__main__":
    main()
