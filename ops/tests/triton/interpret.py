"""Run the Triton kernels of modules on the interpreter platform; print what is wrong as JSON.

In a process of its own with TRITON_INTERPRET=1: triton decides when it is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from interposer import Candidate, Config, current_registry, place
from interposer.records import Kernel
from interposer_testing import conformance

PACKAGE = "interposer_ops"
PROMISES = ("determinism", "batch invariance")


def kernels(module: str) -> Iterator[tuple[Kernel, Candidate]]:
    """Yield the kernels whose functions stand in ``module``, as in norms._norms_triton."""
    registry = current_registry()
    for candidate in (c for op in registry.ops for c in registry.candidates("kernel", op)):
        record = candidate.record
        if isinstance(record, Kernel) and record.target.startswith(f"{PACKAGE}.{module}:"):
            yield record, candidate


def result(op: str, candidate: Candidate, first: bool, seed: int, promises: bool) -> dict[str, Any]:
    """Return how the accepted quick cases went; with ``first``, only the first case."""
    device = place(Config(platform="interpreter")).device
    begun = time.perf_counter()
    aspects = ("numerics", *PROMISES) if promises else ("numerics",)
    num_run, faults, refusals = 0, list[str](), set[str]()
    # A case is built when its trial is drawn, which takes longer than a call.
    for trial in conformance(current_registry(), device, op=op, quick=True, seed=seed):
        if trial.candidate is not candidate or trial.aspect not in aspects:
            continue
        if not trial.verdict:
            refusals.add(trial.verdict.reason)
            continue
        num_run += 1
        faults += [f"{trial}: {fault}" for fault in trial.run()]
        if first:
            break
    return {
        "run": num_run,
        "faults": faults,
        "refusals": sorted(refusals),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+", help="as norms._norms_triton")
    parser.add_argument("--first", action="store_true", help="run one case of each kernel")
    parser.add_argument("--promises", action="store_true", help="try what is promised of rows too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = {
        record.name: result(record.op, candidate, options.first, options.seed, options.promises)
        for module in options.modules
        for record, candidate in kernels(module)
    }
    json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
