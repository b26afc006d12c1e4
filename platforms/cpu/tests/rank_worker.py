"""One rank of a scene of test_communicator.py; prints its result as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.waiting import WAIT_SECONDS, wait_until

from interposer import Ranks, current_platform
from interposer.errors import ConfigError, RankError
from interposer_cpu import _segment
from interposer_cpu._communicator import SharedMemoryCommunicator
from interposer_cpu._kernels.norms import fused_add_rms_norm

Found = dict[str, Any]


class Rank:
    """Environment of a scene: the rank, its communicator, and a folder for signals to the test."""

    def __init__(self, rank: int, size: int, folder: Path, options: list[str]) -> None:
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
        limit = timedelta(seconds=WAIT_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        self.rank, self.folder, self.options = rank, folder, options
        self.ranks = Ranks.of(dist.group.WORLD, current_platform(), WAIT_SECONDS)

    def communicator(self) -> SharedMemoryCommunicator:
        new_communicator = SharedMemoryCommunicator(self.ranks, "cpu")
        new_communicator.open()
        return new_communicator

    def ready(self) -> None:
        """Write the process id to a file, whose content is complete once the file exists."""
        unfinished = self.folder / f"unready{self.rank}"
        unfinished.write_text(str(os.getpid()))
        unfinished.rename(self.folder / f"ready{self.rank}")

    def wait_for_test(self) -> None:
        wait_until((self.folder / "go").exists, "the test, which lets this rank go on")


def reason_of(call: Callable[[], Any]) -> RankError:
    try:
        call()
    except RankError as error:
        return error
    raise AssertionError("nothing was raised")


def norm(rank: Rank) -> Found:
    ranks, same = rank.communicator(), 0
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        for residual_kind in {kind, torch.float32}:
            for rows, width in ((0, 64), (1, 100), (1, 2048), (7, 96), (33, 4096), (300, 512)):
                torch.manual_seed(rows)
                residual = torch.randn(rows, width).to(residual_kind)
                weight = torch.randn(width).to(kind)
                torch.manual_seed(rows + rank.rank + 1)
                x = torch.randn(rows, width).to(kind)
                total = ranks.all_reduce(x.clone())
                expected = fused_add_rms_norm(total, residual, weight, 1e-6)
                report = ranks.all_reduce_add_rms_norm(x, residual, weight, 1e-6)
                same += all(map(torch.equal, report, expected))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = ranks.all_gather(x, [3, 3])
        scattered = ranks.reduce_scatter(gathered, [2, 4])
        moved = ranks.all_to_all(x, [1, 2], [1 + rank.rank] * 2)
        normed = ranks.all_reduce_add_rms_norm(x + 1, x, torch.ones(4), 1e-6)
        summed = ranks.all_reduce(x * 2)
        return gathered, scattered, moved, *normed, summed + 1, ranks.broadcast(x * 3, 1)

    x = torch.arange(12.0).view(3, 4) + rank.rank
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    equal = all(map(torch.equal, compiled(x), step(x)))
    return {"same": same, "compiled": int(equal)}


def killed(rank: Rank) -> Found:
    ranks = rank.communicator()
    ranks.all_reduce(torch.ones(4))
    rank.ready()
    if rank.rank == 1:
        signal.pause()  # until it is killed
    first = reason_of(lambda: ranks.all_reduce(torch.ones(4)))
    again = reason_of(lambda: ranks.all_reduce(torch.ones(4)))
    return {"lost": first.lost, "reason": first.reason, "again": again.reason}


def interrupted(rank: Rank) -> Found:
    # A shell has what it runs in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks = rank.communicator()
    rank.ready()
    if rank.rank == 1:
        rank.wait_for_test()
        return {"reason": reason_of(lambda: ranks.all_reduce(torch.ones(4))).reason}
    try:
        ranks.all_reduce(torch.ones(4))
    except KeyboardInterrupt:
        (rank.folder / "told").touch()
        rank.wait_for_test()
        return {"raised": "KeyboardInterrupt"}
    return {}


def idle(rank: Rank) -> Found:
    ranks = rank.communicator()
    ranks.all_reduce(torch.ones(4))
    rank.ready()
    if rank.rank == 1:
        rank.wait_for_test()
    return {"sum": ranks.all_reduce(torch.full((4,), rank.rank + 1.0))[0].item()}


def place(rank: Rank) -> Found:
    def none(num_bytes: int) -> Any:
        raise OSError("no room")

    places = ["memfd", "shm", "temporary"]
    for name, where in zip(places, list(_segment._PLACES), strict=True):
        if name != rank.options[0]:
            _segment._PLACES[where] = none
    try:
        ranks = rank.communicator()
    except ConfigError as error:
        return {"reason": str(error)}
    # After this call, every rank has mapped the file, and rank 0 has removed its name.
    total = ranks.all_reduce(torch.full((4,), rank.rank + 1.0))[0].item()
    paths = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    names = {parts[5] for parts in paths if len(parts) == 6 and "interposer-" in parts[5]}
    left = [name for name in names if "(deleted)" not in name]
    return {"sum": total, "left": left}


def differ(rank: Rank) -> Found:
    ranks = rank.communicator()
    x = torch.ones(4, dtype=torch.int32 if rank.rank else torch.float32)
    return {"reason": reason_of(lambda: ranks.all_reduce(x)).reason}


def million(rank: Rank) -> Found:
    ranks, x, wrong = rank.communicator(), torch.empty(8, dtype=torch.bfloat16), 0
    for count in range(1_000_000):
        x.fill_(count % 64 + rank.rank)
        ranks.all_reduce(x)
        if count % 100 == 0:
            wrong += not torch.equal(x, torch.full_like(x, 2 * (count % 64) + 1))
    return {"wrong": wrong}


def main() -> None:
    scene, number, size, folder, *options = sys.argv[1:]
    rank = Rank(int(number), int(size), Path(folder), options)
    report = globals()[scene](rank)
    # Or a thread of gloo that frees its last tensor while Python ends would end the process.
    dist.destroy_process_group()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
