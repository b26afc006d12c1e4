"""Count the processor time of a first start: every plugin is examined, nothing is remembered.

    python benchmarks/first_start.py [PYTHON ...] [--rounds 5]

Each PYTHON is that of an environment with the distributions installed, such as another version's;
without one it is this one. They take turns. Examinations run in processes that outlive the one that
started them, so this process adopts and waits for all of them, which works on Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile

START = "from interposer import current_registry; print(len(current_registry().plugins.loaded))"
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def first_start(python: str) -> tuple[float, int]:
    """Return the seconds of all processes of one start, and how many plugins it found."""
    kept = {key: value for key, value in os.environ.items() if "INTERPOSER" not in key}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [python, "-c", START],
            env={**kept, "INTERPOSER_CACHE_DIR": cache},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, int(done.stdout)


def main() -> None:
    """Print the median and the range of each environment, and the ratio to the first one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", nargs="*", default=[sys.executable])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0):
        raise SystemExit("Orphaned processes cannot be adopted here, so nothing can be counted.")
    found: dict[str, list[float]] = {python: [] for python in asked.python}
    counts = {}
    for python in asked.python:
        first_start(python)  # compiles modules and fills the pages of the disk
    for _ in range(asked.rounds):
        for python, seconds in found.items():
            spent, counts[python] = first_start(python)
            seconds.append(spent)
    first = statistics.median(found[asked.python[0]])
    for python, seconds in found.items():
        middle = statistics.median(seconds)
        print(
            f"{middle:6.2f} s  {min(seconds):.2f} to {max(seconds):.2f}  x{middle / first:.2f}  "
            f"{counts[python]} plugins  {python}"
        )


if __name__ == "__main__":
    main()
