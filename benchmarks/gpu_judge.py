"""Judge the corpus of cheats and honest kernels on an accelerator.

    python benchmarks/gpu_judge.py [--platform NAME] [--json FILE]

Kernels that need CUDA or Triton come first, then the cheats that run anywhere. A wrong verdict is a
fault. With ``--tiny``, one cheat and one honest Triton kernel are judged on Triton's interpreter.
"""

from __future__ import annotations

import argparse

from evidence.record import Deadline, Record, add_step_options
from gpu_clock import placement_of
from interposer_testing import Budget, judge, read_solution, read_task
from interposer_testing.corpus import Entry, entries

_BUDGET = Budget(correctness_seconds=3.0, timing_seconds=1.5, rerun_seconds=2.0)
_TINY = ("partial_grid.half_of_the_rows", "triton_kernel.tiles_of_columns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_step_options(parser)
    options = parser.parse_args()
    found = placement_of(options.platform, options.tiny).device
    record, device = Record(options.json), found.torch_device
    record.facts["device"] = found.name
    judged = [entry for entry in _ordered() if not options.tiny or entry.name in _TINY]
    num_right = 0
    for name in record.within([e.name for e in judged], Deadline(options.seconds), "kernels"):
        (entry,) = (entry for entry in judged if entry.name == name)
        with record.guarded(name):
            num_right += _judge(entry, device, record)
    record.headline = f"{num_right} of {len(record.rows)} verdicts on {device} are right"
    if not num_right:
        record.faults.append("no verdict is right, so nothing is proved")
    record.say(record.headline)


def _ordered() -> list[Entry]:
    """Return the kernels that can run on a GPU, those that only run there first."""
    needs = ("cuda", "triton", "cpu")
    chosen = [
        entry
        for entry in entries()
        # Honest kernels for a CPU may read their arguments as memory of the host.
        if entry.needs in needs and (entry.needs != "cpu" or entry.verdict == "refused")
    ]
    return sorted(chosen, key=lambda entry: needs.index(entry.needs))


def _judge(entry: Entry, device: str, record: Record) -> bool:
    """Judge one kernel, and return whether the verdict is right."""
    task = read_task(entry.op)
    solution = read_solution(f"{entry.path}:{entry.function}", task, device)
    verdict = judge(task, solution, device=device, budget=_BUDGET)
    is_right = (verdict.state == "accepted") == (entry.verdict == "accepted")
    first = str(verdict.findings[0]) if verdict.findings else ""
    text = f"{entry.name:44}{verdict.state:11}{verdict.seconds:>6.1f} s  {first[:100]}"
    record.row(text, kernel=entry.name, expected=entry.verdict, state=verdict.state, finding=first)
    if not is_right:
        record.fault(f"{entry.name}: {verdict.state}, must be {entry.verdict}. {first}")
    return is_right


if __name__ == "__main__":
    main()
