"""The processes that test a communicator: one per rank, started once for all checks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from interposer.tooling import child_environment
from interposer_testing._checks.collective import CollectiveCase
from interposer_testing._checks.fault import Fault

_PROGRAM = "from interposer_testing._trials.rank_processes import main; main()"
_LIMIT_SECONDS = 240.0
# A crash is described at the end of the output.
_MAX_ERROR_CHARACTERS = 2000
LEFT = "what is left"
"""Label of the check that no file remains after all ranks have ended."""


class RankProcesses:
    """The processes of a communicator's ranks; the first requested result starts all checks.

    Args:
        request: "target", "platform", "devices" by rank and "properties" of the communicator;
            "stages": cases by collective by number of ranks; "lost": the case that one rank does
            not join; "labels" of all checks.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._size = max(int(num) for num in request["stages"])

    def faults(self, label: str) -> list[Fault]:
        """Return the faults of all ranks in one check; a check that was not reached is a fault."""
        faults = [fault for by_label in self._faults_by_rank for fault in by_label.get(label, ())]
        if label == LEFT:
            faults += [
                Fault("ranks", "close", f"{path} is still there")
                for path in sorted(self._shared)
                if Path(path).exists()
            ]
        elif not any(label in by_label for by_label in self._faults_by_rank):
            faults.append(Fault("call", label, "was not reached, because an earlier check failed"))
        # Ranks often report the same fault.
        return list({(fault.where, fault.reason): fault for fault in faults}.values())

    @property
    def _faults_by_rank(self) -> list[dict[str, list[Fault]]]:
        return self._results[0]

    @property
    def _shared(self) -> set[str]:
        return self._results[1]

    @cached_property
    def _results(self) -> tuple[list[dict[str, list[Fault]]], set[str]]:
        """Run all ranks; return faults by label for each rank, and the shared-memory files."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "request").write_text(json.dumps({**self._request, "path": sys.path}))
            command = [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, folder]
            errors = [Path(folder, f"errors{rank}") for rank in range(self._size)]
            ranks = []
            for rank, path in enumerate(errors):
                # A file, because a rank could block on a full pipe while another rank is awaited.
                with path.open("w") as file:
                    ranks.append(
                        subprocess.Popen(
                            [*command, str(rank), str(self._size)],
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=file,
                            env=child_environment(OMP_NUM_THREADS="1"),
                        )
                    )
            try:
                ends = _ends(ranks)
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
            faults_by_rank, shared = list[dict[str, list[Fault]]](), set[str]()
            for rank, end in enumerate(ends):
                report = Path(folder, f"rank{rank}")
                if not report.exists():
                    stderr = errors[rank].read_text(errors="replace")[-_MAX_ERROR_CHARACTERS:]
                    fault = Fault("call", f"rank {rank}", f"its process {end}", traceback=stderr)
                    faults_by_rank.append({label: [fault] for label in self._request["labels"]})
                    continue
                facts = json.loads(report.read_text())
                shared |= {*facts["shared"]}
                faults_by_rank.append(
                    {
                        label: [Fault(**fault) for fault in faults]
                        for label, faults in facts["faults"].items()
                    }
                )
            return faults_by_rank, shared


def _ends(ranks: list[subprocess.Popen[bytes]]) -> list[str]:
    """Wait for all processes, and describe how each one ended."""
    limit, ends = time.monotonic() + _LIMIT_SECONDS, list[str]()
    for process in ranks:
        try:
            # Also past the limit, so that a rank that has ended is not reported as late.
            code = process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            ends.append(f"took more than {_LIMIT_SECONDS:g} s, and was ended")
            continue
        if code < 0:
            ends.append(f"was killed by {signal.Signals(-code).name}")
        else:
            ends.append(f"left with exit code {code}")
    return ends


def main() -> None:
    """Run the checks of one rank, in a process that ``RankProcesses`` started."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    request = json.loads(Path(folder, "request").read_text())
    sys.path[:] = request["path"]
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from interposer import Config, Ranks, current_platform
    from interposer.records import load_target
    from interposer_testing._checks.communicator import CommunicatorChecks

    device = request["devices"][rank]
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    platform = current_platform(Config(platform=request["platform"]))
    make, properties = load_target(request["target"]), set(request["properties"])
    faults, shared = dict[str, list[Any]](), set[str]()

    def report() -> None:
        facts = {"faults": faults, "shared": sorted(shared)}
        # Write and rename, so that the parent never reads half a file.
        partial = folder / f"partial{rank}"
        partial.write_text(json.dumps(facts))
        partial.rename(folder / f"rank{rank}")

    def create_checks(num: int) -> CommunicatorChecks | None:
        group = dist.new_group(list(range(num)))
        if rank >= num:
            return None
        return CommunicatorChecks(make, Ranks.of(group, platform), device, platform, properties)

    def record(checks: CommunicatorChecks) -> None:
        shared.update(checks.shared)
        for label, faults_of_check in checks.faults.items():
            faults[label] = [asdict(fault) for fault in faults_of_check]

    with torch.inference_mode():
        for num, stage in request["stages"].items():
            # ``new_group`` is collective: ranks outside of the stage must call it too.
            if checks := create_checks(int(num)):
                checks.run({name: [_case(c) for c in cases] for name, cases in stage.items()})
                record(checks)
            dist.barrier()
        for leaves in (False, True):
            if checks := create_checks(size):

                def report_rank(checks: CommunicatorChecks = checks) -> None:
                    record(checks)
                    report()

                checks.lose(_case(request["lost"]), leaves=leaves, report=report_rank)
                record(checks)
    report()
    # Skip the destruction of the default group, which would wait for the lost rank.
    os._exit(0)


def _case(facts: dict[str, Any]) -> CollectiveCase:
    shapes = {name: tuple(facts[name]) for name in ("sizes", "tail")}
    return CollectiveCase(**{**facts, **shapes})
