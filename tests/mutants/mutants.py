"""Mutation testing: how many random faults of the product a tier of the tests finds.

    python tests/mutants/mutants.py draw MUTANTS [--number 300] [--seed 46]
    python tests/mutants/mutants.py record MUTANTS RECORD --checkout DIR -m MARKS
    python tests/mutants/mutants.py judge MUTANTS RECORD RESULTS --checkout DIR -m MARKS
    python tests/mutants/mutants.py report MUTANTS RESULTS BASELINE_RESULTS

``record`` runs the tests with a call before each line of a mutant, and so finds out which tests
execute it. ``judge`` changes one line at a time and runs the tests that execute it, the fastest
first, until one of them fails. Both change the sources of the checkout and put them back, so let
them have one that nobody else uses; its ``.venv`` is what the tests run in. ``report`` compares
the mutants that two suites kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = Path(__file__).resolve().parent  # of pytest
sys.path.insert(0, str(ROOT))

from tests.mutants.drawing import Mutant, draw, mutate  # noqa: E402
from tests.mutants.signposts import installed, read_intervals, read_tests  # noqa: E402

LIMIT_SECONDS = 150.0
# What importing takes is paid once: each mutant's tests run in a fork of this process.
_PRELOADED = ("numpy", "pytest", "torch", "transformers", "transformers.generation")
# Collecting many modules takes longer than their tests, and most mutants die early.
_MODULES_AT_FIRST, _GROWTH = 3, 6


def read_mutants(file: Path) -> list[Mutant]:
    return [Mutant(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]


def read_results(file: Path | None) -> dict[str, Any]:
    if file is None or not file.is_file():
        return {}
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return results


def draw_mutants(arguments: argparse.Namespace) -> None:
    mutants = draw(ROOT, arguments.number, arguments.seed)
    text = json.dumps([asdict(mutant) for mutant in mutants], indent=1)
    arguments.mutants.write_text(text, encoding="utf-8")


def record(arguments: argparse.Namespace) -> None:
    checkout, folder = arguments.checkout.resolve(), arguments.record.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "MUTANTS_RECORD": str(folder), "PYTHONPATH": str(PLUGINS)}
    pytest = [checkout / ".venv" / "bin" / "python", "-m", "pytest", "-p", "recorder"]
    with installed(checkout, read_mutants(arguments.mutants), folder / "hits"):
        for tier, workers in (("not process", ["-n", "2", "--dist", "loadgroup"]), ("process", [])):
            marks = ["-m", f"{tier} and {arguments.marks}"]
            subprocess.run([*pytest, *workers, *marks], cwd=checkout, env=environment, check=False)


def in_parts(tests: list[str]) -> Iterator[list[str]]:
    """Split tests, the fastest first, into parts of few and then of more and more modules."""
    modules = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    start, size = 0, _MODULES_AT_FIRST
    while start < len(modules):
        part = set(modules[start : start + size])
        yield [test for test in tests if test.partition("::")[0] in part]
        start, size = start + size, size * _GROWTH


def run_tests(checkout: Path, tests: list[str], marks: str) -> tuple[str, str]:
    """Run ``tests`` in a fork until one fails. Returns: the outcome, and the test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").write_text("\n".join(tests), encoding="utf-8")
        output = Path(folder) / "output"
        child = os.fork()
        if not child:
            ended = 1
            try:
                ended = _run_in_fork(checkout, Path(folder), output, marks, tests)
            except Exception:  # noqa: BLE001  # the fork must end, and say why
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(ended)
        end = time.monotonic() + LIMIT_SECONDS
        code: int | None = None
        while code is None and time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
            return "undecided", f"{LIMIT_SECONDS:.0f} s"
        text = output.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
        if code in (0, 5):
            return "survived", ""
        if code < 0:
            return "killed", f"signal {-code}"
        return "killed", failed[1] if failed else f"exit code {code}: {text[-1000:]}"


def _run_in_fork(checkout: Path, folder: Path, output: Path, marks: str, tests: list[str]) -> int:
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.chdir(checkout)
    os.environ["MUTANTS_TESTS"] = f"{folder}/tests"
    import pytest

    files = sorted({nodeid.partition("::")[0] for nodeid in tests})
    files = [file for file in files if (checkout / file).is_file()]
    if not files:
        return 5
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "selection"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is preloaded
    return int(pytest.main([*options, "--timeout=300", "-m", marks, *files]))


@contextlib.contextmanager
def changed(file: Path, source: str, number: int) -> Iterator[None]:
    """Give a module other source within the ``with`` block."""
    original, times = file.read_bytes(), file.stat()
    try:
        file.write_text(source, encoding="utf-8")
        # Bytecode that was compiled from another mutant of this size must not be taken.
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10 * (number + 1)))
        yield
    finally:
        file.write_bytes(original)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def judge(arguments: argparse.Namespace) -> None:
    for name in _PRELOADED:
        __import__(name)
    sys.path.insert(0, str(PLUGINS))
    checkout = arguments.checkout.resolve()
    intervals = read_intervals(arguments.record)
    seconds = {test: sum(end - start for start, end in of) for test, of in intervals.items()}
    executing = read_tests(arguments.record / "hits", intervals)
    done, skipped = read_results(arguments.results), read_results(arguments.unless)
    part, parts = map(int, arguments.part.split("/"))
    unreliable = set[str]()
    while True:
        for number, mutant in enumerate(read_mutants(arguments.mutants)):
            key = str(number)
            if number % parts != part or skipped.get(key, {}).get("outcome") == "killed":
                continue
            if key in done and done[key]["by"] not in unreliable:
                continue
            tests = [test for test in executing.get(number, ()) if test not in unreliable]
            tests = choose(tests, mutant, seconds, arguments.seconds)
            began = time.monotonic()
            outcome, by = judge_one(checkout, mutant, number, tests, arguments.marks)
            took = round(time.monotonic() - began, 1)
            done[key] = {"outcome": outcome, "by": by, "tests": len(tests), "seconds": took}
            arguments.results.write_text(json.dumps(done, indent=1), encoding="utf-8")
            print(number, mutant.path, mutant.line, outcome, by[:120], took, flush=True)
        failing = control(checkout, {result["by"] for result in done.values()}, arguments.marks)
        if not failing:
            break
        print("fail without a mutant as well:", *failing, flush=True)
        unreliable |= failing


def choose(
    tests: list[str], mutant: Mutant, seconds: Mapping[str, float], limit: float
) -> list[str]:
    """Return the tests to run: those of the mutant's distribution first, each the fastest first.

    Some lines are executed by every test that runs a model, so that what would take longer than
    ``limit`` seconds altogether is left out.
    """
    distribution = mutant.path.partition("/src/")[0] + "/"
    chosen, total = list[str](), 0.0
    for test in sorted(
        tests, key=lambda test: (not test.startswith(distribution), seconds.get(test, 0.0), test)
    ):
        total += seconds.get(test, 0.0)
        if chosen and total > limit:
            break
        chosen.append(test)
    return chosen


def judge_one(
    checkout: Path, mutant: Mutant, number: int, tests: list[str], marks: str
) -> tuple[str, str]:
    source = mutate(checkout, mutant)
    if source is None:
        return "gone", ""
    outcome, by = "survived", ""
    for some in in_parts(tests):
        with changed(checkout / mutant.path, source, number):
            outcome, by = run_tests(checkout, some, marks)
        if outcome != "survived":
            break
    return outcome, by


def control(checkout: Path, killers: set[str], marks: str) -> set[str]:
    """Return the tests that killed a mutant and fail without it as well."""
    tests, failing = sorted(killer for killer in killers if "::" in killer), set[str]()
    while tests:
        outcome, by = run_tests(checkout, tests, marks)
        if outcome != "killed":
            break
        if by not in tests:
            raise RuntimeError(f"no test runs without a mutant either: {by}")
        failing.add(by)
        tests.remove(by)
    return failing


def report(arguments: argparse.Namespace) -> None:
    new, old = read_results(arguments.results), read_results(arguments.baseline)
    counts, lost = Counter[tuple[bool, bool]](), list[str]()
    mutants = read_mutants(arguments.mutants)
    for number, mutant in enumerate(mutants):
        by_tiers = new[str(number)]["outcome"] == "killed"
        by_baseline = old.get(str(number), {}).get("outcome") == "killed"
        counts[by_tiers, by_baseline] += 1
        if by_baseline and not by_tiers:
            change = f"{mutant.path}:{mutant.line} {mutant.operator}"
            lost.append(f"{change}: {old[str(number)]['by']}")
    # The baseline has the tests of the tiers as well, so it is not asked what those kill.
    killed = counts[True, True] + counts[True, False]
    total = killed + len(lost)
    print(f"{len(mutants)} mutants: the baseline kills {total}, the tiers kill {killed} of these")
    print(f"({killed / max(1, total):.1%}); no test kills {counts[False, False]}.")
    print("Killed by the baseline alone:", *lost, sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("draw")
    command.add_argument("mutants", type=Path)
    command.add_argument("--number", type=int, default=300)
    command.add_argument("--seed", type=int, default=46)
    command.set_defaults(run=draw_mutants)
    command = commands.add_parser("record")
    command.add_argument("mutants", type=Path)
    command.add_argument("record", type=Path)
    command.add_argument("--checkout", type=Path, required=True)
    command.add_argument("-m", dest="marks", required=True, help="marks of the tests, as of pytest")
    command.set_defaults(run=record)
    command = commands.add_parser("judge")
    for name in ("mutants", "record", "results"):
        command.add_argument(name, type=Path)
    command.add_argument("--checkout", type=Path, required=True)
    command.add_argument("-m", dest="marks", required=True, help="marks of the tests, as of pytest")
    command.add_argument("--part", default="0/1", help="0/2 and 1/2 share the work")
    command.add_argument("--seconds", type=float, default=60.0, help="of tests, for each mutant")
    command.add_argument("--unless", type=Path, help="results: leave out what these kill")
    command.set_defaults(run=judge)
    command = commands.add_parser("report")
    for name in ("mutants", "results", "baseline"):
        command.add_argument(name, type=Path)
    command.set_defaults(run=report)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
