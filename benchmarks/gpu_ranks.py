"""Run two processes on one accelerator: their sums, and the tokens of a model that they share.

    python benchmarks/gpu_ranks.py [MODEL_DIR] [--platform NAME] [--seconds N] [--json FILE]

Without a second device neither NCCL nor a fast path between devices can be tried. What can: the
collectives of torch.distributed through the host's memory, sums in symmetric memory, which torch
allows on one device if ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES`` says so, a graph of such a
sum, and a model on two ranks, whose tokens have to be those of one. Times of sums are not taken:
processes of one device wait for each other's turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from evidence.record import Deadline, Record, add_step_options
from gpu_clock import placement_of
from interposer import Communicator, Config, Placement, Ranks
from interposer.records import load_target
from interposer_engine import load
from random_model import write_model

_NUM = 2
_MODEL = Path(__file__).resolve().parents[1] / "examples" / "models" / "stdlib-lm"
_PORTABLE = "interposer_ops.communicators:TorchCommunicator"
_SYMMETRIC = "interposer_cuda._symmetric_memory.sums"
_PROMPTS = ["import os\n", "def read(path):\n    with open(path) as file:\n"]
# Elements of a sum, of which the last is the most that the shared buffer takes in float32.
_LENGTHS = (1, 3, 1001, 40_000, 2 << 20)
_PART_S = 60.0


def main() -> None:
    options = parsed()
    if options.rank is not None:
        run_part(options)
        return
    placement = placement_of(options.platform, options.tiny)
    record, deadline = Record(options.json), Deadline(options.seconds)
    record.facts |= {"device": placement.device.name, "torch": torch.__version__}
    parts = ["collectives", "model"]
    if placement.platform.name == "cuda":
        parts += ["one_shot", "two_shot", "graph", "nccl"]
    for part in record.within(parts, deadline, "parts", 10.0):
        with record.guarded(part):
            start = time.perf_counter()
            told = by_ranks(part, options, min(_PART_S, deadline.left_s()))
            record.row(f"{part}: {told}", part=part, told=told, seconds=time.perf_counter() - start)
    record.headline = f"{len(record.rows)} of {len(parts)} parts held on {_NUM} ranks of one device"
    record.say(record.headline)


def by_ranks(part: str, options: argparse.Namespace, limit_s: float) -> str:
    """Run a part in processes; return what rank 0 says of it.

    Raises: RuntimeError: a rank failed or was too slow; says the last line of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "faulthandler", __file__, str(options.model)]
        command += ["--part", part, "--folder", folder, "--platform", options.platform]
        command += ["--tiny"] if options.tiny else []
        environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        ranks = []
        for rank in range(_NUM):
            with Path(folder, f"log{rank}").open("w") as file:
                ranks.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank)], stdout=file, stderr=file, env=environment
                    )
                )
        end = time.monotonic() + limit_s
        states: list[int | None] = []
        try:
            for process in ranks:
                try:
                    states.append(process.wait(max(0.1, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    states.append(None)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(state != 0 for state in states):
            logs = [Path(folder, f"log{rank}").read_text(errors="replace") for rank in range(_NUM)]
            last = [(text.strip().splitlines() or ["nothing"])[-1][:400] for text in logs]
            print(*logs, sep="\n", file=sys.stderr)
            raise RuntimeError(f"ranks ended with {states} within {limit_s:.0f} s: {last}")
        return str(json.loads(Path(folder, "told").read_text()))


def run_part(options: argparse.Namespace) -> None:
    """Be one rank of a part."""
    placement = placement_of(options.platform, options.tiny)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.folder}/store",
        rank=options.rank,
        world_size=_NUM,
        timeout=timedelta(seconds=_PART_S),
    )
    parts: dict[str, Callable[[Placement, argparse.Namespace], str]] = {
        "collectives": collectives,
        "model": model,
        "one_shot": one_shot,
        "two_shot": two_shot,
        "graph": graph,
        "nccl": nccl,
    }
    told = parts[options.part](placement, options)
    if options.rank == 0:
        (options.folder / "told").write_text(json.dumps(told))
    sys.stdout.flush()
    # A group of a device may wait for ranks that are gone.
    os._exit(0)


@contextmanager
def opened(target: str, placement: Placement, backend: str) -> Iterator[Communicator]:
    """Give a communicator of the two ranks, both on the first device."""
    with mock.patch.object(
        type(placement.platform), "distributed_backend", return_value=backend, create=True
    ):
        ranks = Ranks.of(dist.group.WORLD, placement.platform, 20.0)
    found = load_target(target)(ranks, placement.device.torch_device)
    found.open()
    yield found
    found.close()


def sums(communicator: Communicator, dtypes: tuple[torch.dtype, ...]) -> int:
    """Check exact sums of all lengths; return how many there were.

    Raises: RuntimeError: a sum is wrong, or another one later on the same values.
    """
    device, count = communicator.device, 0
    for dtype in dtypes:
        for length in _LENGTHS:
            generator = torch.Generator().manual_seed(length)
            all_ranks = torch.randint(-8, 9, (_NUM, length), generator=generator)
            for _ in range(2):
                x = all_ranks[dist.get_rank()].to(dtype).to(device)
                expect(communicator.all_reduce(x), all_ranks.sum(0), f"{length} of {dtype}")
                count += 1
    return count


def expect(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if not torch.equal(found.cpu().double(), expected.double()):
        wrong = int((found.cpu().double() != expected.double()).sum())
        raise RuntimeError(f"{name}: {wrong} of {expected.numel()} elements are wrong")


def collectives(placement: Placement, options: argparse.Namespace) -> str:
    """Check every collective of the portable communicator through the host's memory."""
    rank = dist.get_rank()
    with opened(_PORTABLE, placement, "gloo") as communicator:
        device = communicator.device
        floats = (torch.float32, torch.bfloat16, torch.float16)
        count = sums(communicator, floats)
        sizes = [3, 2]
        rows = torch.arange(sum(sizes) * 4).reshape(-1, 4).to(device, torch.bfloat16)
        mine = rows.split(sizes)[rank]
        expect(communicator.all_gather(mine, sizes), rows.cpu(), "all_gather")
        part = 2 * rows.cpu().split(sizes)[rank]
        expect(communicator.reduce_scatter(rows, sizes), part, "reduce_scatter")
        sent, received = ([1, 4], [1, 2]) if rank == 0 else ([2, 3], [4, 3])
        back = communicator.all_to_all(rows, sent, received)
        whole = rows.cpu()
        parts = (whole[:1], whole[:2]) if rank == 0 else (whole[1:], whole[2:])
        expect(back, torch.cat(parts), "all_to_all")
        told = torch.full((5,), float(rank), device=device)
        expect(communicator.broadcast(told, 1), torch.ones(5), "broadcast")
    return f"{count} sums and four other collectives through the host's memory are exact"


def model(placement: Placement, options: argparse.Namespace) -> str:
    """Compare the greedy tokens of a model on two ranks with those of one, in float32."""
    path = options.model
    if options.tiny:
        path = options.folder / "tiny"
        if dist.get_rank() == 0:
            write_model("tiny", path)
        dist.barrier()
    config = Config(platform=placement.platform.name)
    sizes: dict[str, Any] = {"dtype": "float32", "config": config, "cache_tokens": 1024}
    prompts: Any = [[5, 6, 7]] if options.tiny else _PROMPTS
    num = 3 if options.tiny else 32
    with mock.patch.object(
        type(placement.platform), "distributed_backend", return_value="gloo", create=True
    ):
        lm = load(path, tensor_parallel=_NUM, **sizes)
    start = time.perf_counter()
    found = [done.token_ids for done in lm.generate(prompts, max_new_tokens=num)]
    seconds = time.perf_counter() - start
    chosen = [note for note in lm.resolver.notes if "rank" in note][:2]
    if dist.get_rank() == 0:
        alone = load(path, **sizes)
        expected = [done.token_ids for done in alone.generate(prompts, max_new_tokens=num)]
        if found != expected:
            raise RuntimeError(f"tokens of two ranks {found} are not those of one {expected}")
    dist.barrier()
    return f"{sum(map(len, found))} tokens are those of one rank, {seconds:.2f} s; {chosen}"


def one_shot(placement: Placement, options: argparse.Namespace) -> str:
    """Check sums in symmetric memory that every rank reads."""
    return symmetric("OneShot", placement)


def two_shot(placement: Placement, options: argparse.Namespace) -> str:
    """Check sums in symmetric memory of which every rank has a share."""
    return symmetric("TwoShot", placement)


def symmetric(name: str, placement: Placement) -> str:
    with opened(f"{_SYMMETRIC}:{name}", placement, "gloo") as communicator:
        count = sums(communicator, (torch.bfloat16, torch.float32))
    return f"{count} sums are exact"


def graph(placement: Placement, options: argparse.Namespace) -> str:
    """Replay a graph of a sum on other numbers."""
    with opened(f"{_SYMMETRIC}:OneShot", placement, "gloo") as communicator:
        x = torch.zeros(4096, device=communicator.device)
        communicator.all_reduce(x)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            communicator.all_reduce(x)
        for number in range(5):
            x.fill_(number + dist.get_rank())
            captured.replay()
            expect(x, torch.full((4096,), 2.0 * number + 1), f"replay {number}")
    return "5 replays are exact"


def nccl(placement: Placement, options: argparse.Namespace) -> str:
    """Say what NCCL tells of two ranks on one device."""
    try:
        with opened(_PORTABLE, placement, "nccl") as communicator:
            count = sums(communicator, (torch.bfloat16,))
    except Exception as error:  # noqa: BLE001 - what it says is what is asked
        return f"refused: {type(error).__name__}: {str(error)[:300]}"
    return f"{count} sums are exact"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", default=_MODEL)
    add_step_options(parser)
    for name, kind in {"--rank": int, "--part": str, "--folder": Path}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
