"""Run every Triton kernel on the interpreter platform and print what is wrong as JSON.

In a process of its own with TRITON_INTERPRET=1: triton decides when it is imported.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from interposer import Config, current_registry, place
from interposer.records import Kernel
from interposer.testing import conformance


def main() -> None:
    registry, device = current_registry(), place(Config(platform="interpreter")).device
    found: dict[str, dict[str, Any]] = {}
    for candidate in (c for op in registry.ops for c in registry.candidates("kernel", op)):
        record = candidate.record
        if not (isinstance(record, Kernel) and record.target.startswith("interposer_ops.triton.")):
            continue
        begun = time.perf_counter()
        run, faults, refusals = 0, [], []
        for trial in conformance(registry, device, op=record.op, quick=True):
            if trial.candidate is not candidate or trial.aspect != "numerics":
                continue
            if trial.verdict:
                run += 1
                faults += [f"{trial}: {fault}" for fault in trial.run()]
            else:
                refusals.append(trial.verdict.reason)
        seconds = time.perf_counter() - begun
        found[record.name] = {
            "run": run,
            "faults": faults,
            "refusals": sorted({*refusals}),
            "seconds": seconds,
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
