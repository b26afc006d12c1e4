"""How long a process takes to start, to import interposer, and to print the command's help."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 10
CASES = {
    "python": ["-c", ""],
    "import interposer": ["-c", "import interposer"],
    "interposer --help": ["-m", "interposer", "--help"],
}


def measure_ms(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    for name, arguments in CASES.items():
        times = [measure_ms(arguments) for _ in range(ROUNDS)]
        print(f"{name:20} {statistics.median(times):7.1f} ms  (best {min(times):.1f})")


if __name__ == "__main__":
    main()
