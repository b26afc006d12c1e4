"""The processes in which a communicator is tried, one for each rank, started once."""

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

_PROGRAM = "from interposer_testing._trials.crew import main; main()"
_LIMIT_SECONDS = 240.0
_MOST_CHARACTERS = 2000
LEFT = "what is left"
"""The label of what is there after all ranks have ended."""


class Crew:
    """The ranks of one communicator, which run all checks when the first result is asked for.

    Args:
        request: target, platform, devices by rank, properties; ``cases`` by collective in
            ``stages`` by number of ranks, and ``lost``, the case that a rank does not come to.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._size = max(int(num) for num in request["stages"])

    def faults(self, label: str) -> list[Fault]:
        """Return the faults under a label, of all ranks; that it was not reached is one."""
        found = [fault for some in self._told for fault in some.get(label, ())]
        if label == LEFT:
            found += [
                Fault("ranks", "close", f"{path} is still there")
                for path in sorted(self._shared)
                if Path(path).exists()
            ]
        elif not any(label in some for some in self._told):
            found.append(Fault("call", label, "was not reached, as an earlier check failed"))
        return list({(fault.where, fault.reason): fault for fault in found}.values())

    @property
    def _told(self) -> list[dict[str, list[Fault]]]:
        return self._ran[0]

    @property
    def _shared(self) -> set[str]:
        return self._ran[1]

    @cached_property
    def _ran(self) -> tuple[list[dict[str, list[Fault]]], set[str]]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "request").write_text(json.dumps({**self._request, "path": sys.path}))
            command = [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, folder]
            errors = [Path(folder, f"errors{rank}") for rank in range(self._size)]
            ranks = []
            for rank, path in enumerate(errors):
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
            told, shared = list[dict[str, list[Fault]]](), set[str]()
            for rank, end in enumerate(ends):
                report = Path(folder, f"rank{rank}")
                if not report.exists():
                    said = errors[rank].read_text(errors="replace")[-_MOST_CHARACTERS:]
                    lost = Fault("call", f"rank {rank}", f"its process {end}", traceback=said)
                    told.append({label: [lost] for label in self._request["labels"]})
                    continue
                facts = json.loads(report.read_text())
                shared |= {*facts["shared"]}
                told.append(
                    {
                        label: [Fault(**fault) for fault in faults]
                        for label, faults in facts["faults"].items()
                    }
                )
            # What the kernel of the system holds of a process that was killed goes with it.
            return told, shared


def _ends(ranks: list[subprocess.Popen[bytes]]) -> list[str]:
    """Wait for all, and return how each ended."""
    limit, ends = time.monotonic() + _LIMIT_SECONDS, list[str]()
    for process in ranks:
        try:
            code = process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            ends.append(f"took more than {_LIMIT_SECONDS:g} s, and was ended")
            continue
        killed = code < 0
        name = signal.Signals(-code).name if killed else ""
        ends.append(f"was killed by {name}" if killed else f"left with exit code {code}")
    return ends


def main() -> None:
    """Run one rank's part of the checks, in a process that ``Crew`` started."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    request = json.loads(Path(folder, "request").read_text())
    sys.path[:] = request["path"]
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from interposer import Config, Ranks, current_platform
    from interposer.records import load_target
    from interposer_testing._checks.communicator import Rehearsal

    device = request["devices"][rank]
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    platform = current_platform(Config(platform=request["platform"]))
    make, properties = load_target(request["target"]), set(request["properties"])
    faults, shared = dict[str, list[Any]](), set[str]()

    def report() -> None:
        facts = {"faults": faults, "shared": sorted(shared)}
        whole = folder / f"partial{rank}"
        whole.write_text(json.dumps(facts))
        whole.rename(folder / f"rank{rank}")

    def rehearsal(num: int) -> Rehearsal | None:
        group = dist.new_group(list(range(num)))
        if rank >= num:
            return None
        return Rehearsal(make, Ranks.of(group, platform), device, platform, properties)

    def note(done: Rehearsal) -> None:
        shared.update(done.shared)
        for label, found in done.faults.items():
            faults[label] = [asdict(fault) for fault in found]

    with torch.inference_mode():
        for num, stage in request["stages"].items():
            if own := rehearsal(int(num)):
                own.run({name: [_case(c) for c in some] for name, some in stage.items()})
                note(own)
            dist.barrier()
        for leaves in (False, True):
            if own := rehearsal(size):
                last = own

                def tell(last: Rehearsal = last) -> None:
                    note(last)
                    report()

                own.lose(_case(request["lost"]), leaves=leaves, tell=tell)
                note(own)
    report()
    # The default group misses a rank, of which its destruction would wait.
    os._exit(0)


def _case(facts: dict[str, Any]) -> CollectiveCase:
    shapes = {name: tuple(facts[name]) for name in ("sizes", "tail")}
    return CollectiveCase(**{**facts, **shapes})
