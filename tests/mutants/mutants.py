"""Mutation testing: how many random faults of the product a tier of the tests finds.

    python tests/mutants/mutants.py draw RECORD MUTANTS [--number 300] [--seed 46]
    python tests/mutants/mutants.py judge RECORD MUTANTS RESULTS --checkout DIR -m MARKS
    python tests/mutants/mutants.py report MUTANTS RESULTS BASELINE_RESULTS

RECORD is the folder that a run of the tests with ``-p tests.mutants.recorder`` wrote. ``judge``
changes one line of the checkout at a time, so let it have one that nobody else uses: it runs the
tests that execute the line, the fastest first, until one of them fails. ``report`` compares the
mutants that two suites kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LIMIT_SECONDS = 900.0
# What importing takes is paid once: each mutant's tests run in a fork of this process.
_PRELOADED = ("hypothesis", "numpy", "pytest", "torch", "transformers", "transformers.generation")


def read_lines(record: Path) -> dict[str, dict[int, list[str]]]:
    """Return the ids of the tests that execute each line, by path and line.

    What the setup of a test executes counts for all tests of its module.
    """
    cache = record / "lines.json"
    if cache.is_file():
        loaded = json.loads(cache.read_text(encoding="utf-8"))
        tests = loaded["tests"]
        return {
            path: {
                int(line): [tests[index] for index in indices] for line, indices in lines.items()
            }
            for path, lines in loaded["lines"].items()
        }
    from coverage import CoverageData

    modules = dict[str, list[str]]()
    for nodeid in read_durations(record):
        modules.setdefault(nodeid.partition("::")[0], []).append(nodeid)
    found = dict[str, dict[int, set[str]]]()
    for file in record.glob(".coverage.*"):
        if not file.stat().st_size:
            continue  # of a process that was killed
        data = CoverageData(str(file))
        data.read()
        for name in data.measured_files():
            path = re.sub(r"^.*?/((?:\w+/)?[\w-]+/src/)", r"\1", name)
            path = next((path for path in _suffixes(name) if (ROOT / path).is_file()), path)
            lines = found.setdefault(path, {})
            for line, contexts in data.contexts_by_lineno(name).items():
                for context in contexts:
                    nodeid, _, phase = context.rpartition("|")
                    nodeid = re.sub(r"@[^@\]]*$", "", nodeid)
                    if not nodeid:
                        continue
                    module = nodeid.partition("::")[0]
                    lines.setdefault(line, set()).update(
                        modules.get(module, ()) if phase[0] == "s" else (nodeid,)
                    )
    tests = sorted({nodeid for lines in found.values() for ids in lines.values() for nodeid in ids})
    index = {nodeid: place for place, nodeid in enumerate(tests)}
    written = {
        path: {line: sorted(index[nodeid] for nodeid in ids) for line, ids in lines.items()}
        for path, lines in found.items()
    }
    cache.write_text(json.dumps({"tests": tests, "lines": written}), encoding="utf-8")
    return read_lines(record)


def _suffixes(name: str) -> list[str]:
    parts = Path(name).parts
    return ["/".join(parts[start:]) for start in range(1, len(parts))]


def read_durations(record: Path) -> dict[str, float]:
    durations = dict[str, float]()
    for file in record.glob("durations-*.json"):
        for nodeid, seconds in json.loads(file.read_text(encoding="utf-8")).items():
            nodeid = re.sub(r"@[^@\]]*$", "", nodeid)  # the group that xdist appends
            durations[nodeid] = durations.get(nodeid, 0.0) + seconds
    return durations


def run_tests(checkout: Path, tests: list[str], marks: str) -> tuple[str, str]:
    """Run ``tests`` in a fork until one fails. Returns: the outcome, and the test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").write_text("\n".join(tests), encoding="utf-8")
        output = Path(folder) / "output"
        child = os.fork()
        if not child:
            os.setsid()
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            for standard in (1, 2):
                os.dup2(descriptor, standard)
            os.chdir(checkout)
            os.environ["MUTANTS_TESTS"] = f"{folder}/tests"
            import pytest

            sys.path.insert(0, str(ROOT))
            files = sorted({nodeid.partition("::")[0] for nodeid in tests})
            files = [file for file in files if (checkout / file).is_file()]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.selection"]
            ended = pytest.main([*options, "--timeout=300", "-m", marks, *files])
            sys.stdout.flush()
            os._exit(int(ended))
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
            return "killed", "the time limit"
        text = output.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
        if code == 0:
            return "survived", ""
        if code == 5:
            return "survived", "no test"
        return "killed", failed[1] if failed else f"exit code {code}: {text[-300:]}"


def judge(arguments: argparse.Namespace) -> None:
    from tests.mutants.drawing import Mutant, mutated

    for name in _PRELOADED:
        __import__(name)
    checkout = arguments.checkout.resolve()
    lines, durations = read_lines(arguments.record), read_durations(arguments.record)
    done = dict[str, Any]()
    if arguments.results.is_file():
        done = json.loads(arguments.results.read_text(encoding="utf-8"))
    skipped = dict[str, Any]()
    if arguments.unless:
        skipped = json.loads(arguments.unless.read_text(encoding="utf-8"))
    part, parts = map(int, arguments.part.split("/"))
    mutants = json.loads(arguments.mutants.read_text(encoding="utf-8"))
    for number, entry in enumerate(mutants):
        if number % parts != part or str(number) in done:
            continue
        if skipped.get(str(number), {}).get("outcome") == "killed":
            continue
        mutant = Mutant(**entry)
        file = checkout / mutant.path
        original, times = file.read_bytes(), file.stat()
        place = mutated(checkout, mutant)
        if place is None:
            done[str(number)] = {"outcome": "gone", "by": "", "tests": 0}
            continue
        # The record is of the checkout that the mutants were drawn in, so its lines hold there.
        line, source = (mutant.line if arguments.recorded_lines else place[0]), place[1]
        tests = list(lines.get(mutant.path, {}).get(line, ()))
        tests.sort(key=lambda nodeid: durations.get(nodeid, 0.0))
        began = time.monotonic()
        try:
            file.write_text(source, encoding="utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10 * (number + 1)))
            outcome, by = run_tests(checkout, tests, arguments.marks)
        finally:
            file.write_bytes(original)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        seconds = round(time.monotonic() - began, 1)
        done[str(number)] = {"outcome": outcome, "by": by, "tests": len(tests), "seconds": seconds}
        arguments.results.write_text(json.dumps(done, indent=1), encoding="utf-8")
        print(number, mutant.path, line, outcome, by[:120], len(tests), seconds, flush=True)


def report(arguments: argparse.Namespace) -> None:
    mutants = json.loads(arguments.mutants.read_text(encoding="utf-8"))
    new = json.loads(arguments.results.read_text(encoding="utf-8"))
    old = json.loads(arguments.baseline.read_text(encoding="utf-8"))
    counts, lost = Counter[tuple[str, str]](), list[str]()
    for number, entry in enumerate(mutants):
        outcomes = tuple(
            "killed" if results.get(str(number), {}).get("outcome") == "killed" else "survived"
            for results in (new, old)
        )
        # A test of the new suite that the old one has as well kills for both.
        outcomes = (outcomes[0], "killed" if "killed" in outcomes else "survived")
        counts[outcomes] += 1
        if outcomes == ("survived", "killed"):
            lost.append(
                f"{entry['path']}:{entry['line']} {entry['operator']}: {old[str(number)]['by']}"
            )
    both, only_old = counts["killed", "killed"], counts["survived", "killed"]
    print(f"{len(mutants)} mutants; the baseline kills {both + only_old}, of which the tiers kill")
    print(
        f"{both} ({both / max(1, both + only_old):.1%}); {counts['survived', 'survived']} survive."
    )
    print("Killed by the baseline alone:", *lost, sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("draw")
    command.add_argument("record", type=Path)
    command.add_argument("mutants", type=Path)
    command.add_argument("--number", type=int, default=300)
    command.add_argument("--seed", type=int, default=46)
    command.set_defaults(run=draw_mutants)
    command = commands.add_parser("judge")
    for name in ("record", "mutants", "results"):
        command.add_argument(name, type=Path)
    command.add_argument("--checkout", type=Path, default=ROOT)
    command.add_argument("-m", dest="marks", required=True, help="marks of the tests, as of pytest")
    command.add_argument("--part", default="0/1", help="0/2 and 1/2 share the work")
    command.add_argument("--unless", type=Path, help="results: leave out what these kill")
    command.add_argument("--recorded-lines", action="store_true")
    command.set_defaults(run=judge)
    command = commands.add_parser("report")
    for name in ("mutants", "results", "baseline"):
        command.add_argument(name, type=Path)
    command.set_defaults(run=report)
    arguments = parser.parse_args()
    arguments.run(arguments)


def draw_mutants(arguments: argparse.Namespace) -> None:
    from tests.mutants.drawing import draw

    lines = {path: of for path, of in read_lines(arguments.record).items() if "/src/" in path}
    mutants = draw(ROOT, lines, arguments.number, arguments.seed)
    arguments.mutants.write_text(
        json.dumps([asdict(mutant) for mutant in mutants], indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
