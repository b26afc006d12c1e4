"""How processes of several ranks end: one is killed or stopped, or the user ends the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.forks import forks
from tests.processes import lives, shared_files
from tests.waiting import WAIT_SECONDS, wait_until

STDLIB = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
# It prints the ids of the processes, then generates until it is ended, in a thread if the last
# argument says so, or computes nothing if it is "idle". A thread prints a line once it has
# generated something.
PROGRAM = """
import asyncio, os, signal, sys, time
from interposer import Config
from interposer.errors import InterposerError
from interposer_engine import AsyncLanguageModel, launched
from interposer_engine._distributed import launcher
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
async def serve(lm):
    async with AsyncLanguageModel(lm) as front:
        await front.generate([[1, 2, 3]], max_new_tokens=1)
        print("generating", flush=True)
        while True:
            try:
                await front.generate([[1, 2, 3]], max_new_tokens=300, ignore_eos=True)
            except InterposerError:  # as a server, which answers each client for itself
                await asyncio.sleep(0.01)
try:
    with launched(2, timeout_seconds=float(sys.argv[2])) as load:
        # With the layers that a plain installation has: the ranks wait inside of fused blocks.
        config = Config(
            platform="cpu", disable=["interposer-example-norm"], layers={"rms_norm": "standard"}
        )
        lm = load(sys.argv[1], cache_tokens=512, max_sequences=1, config=config)
        children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        asked = [open(f"/proc/{child}/cmdline").read() for child in children]
        ranks = [c for c, a in zip(children, asked) if "_distributed.launcher" in a]
        print(os.getpid(), *ranks, flush=True)
        if sys.argv[3] == "thread":
            asyncio.run(serve(lm))
        if sys.argv[3] == "idle":
            front = AsyncLanguageModel(lm)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a server that drains
            print("no trouble" if not front.trouble else front.trouble, flush=True)
            while not front.trouble:
                time.sleep(0.01)
            sys.exit(f"trouble: {front.trouble}")
        while True:
            lm.generate([[1, 2, 3]], max_new_tokens=300, ignore_eos=True)
except InterposerError as error:
    sys.exit(f"error: {error}")
"""
pytestmark = [
    pytest.mark.process,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif("not os.path.isdir('/proc/self')", reason="needs /proc"),
]


@contextmanager
def generating(
    timeout_seconds: float, where: str = "main"
) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Start two ranks, and give the client of rank 0's process, its id and that of rank 1."""
    command = forks().command("-c", PROGRAM, STDLIB, str(timeout_seconds), where)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        leader, follower = map(int, line.split())
        yield process, leader, follower
    finally:
        process.kill()
        process.communicate()


def wait_for_ends(*pids: int) -> None:
    wait_until(lambda: not any(map(lives, pids)), f"the end of the processes {pids}")


def kill_follower(leader: int, follower: int) -> None:
    os.kill(follower, signal.SIGKILL)


def stop_follower(leader: int, follower: int) -> None:
    os.kill(follower, signal.SIGSTOP)


def interrupt(leader: int, follower: int) -> None:
    os.kill(leader, signal.SIGINT)


def kill_leader_beside_a_stopped_follower(leader: int, follower: int) -> None:
    os.kill(follower, signal.SIGSTOP)
    os.kill(leader, signal.SIGKILL)


# The time limit of the ranks in tests that wait until it is over.
SHORT_SECONDS = 10.0


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (kill_follower, r"error: Rank 0: rank 1 was ended by SIGKILL"),
        # It has to wait until the time is over.
        pytest.param(
            stop_follower,
            r"error: Rank 0: .*rank 1 (hangs|did not come)",
            marks=pytest.mark.slow,
        ),
        (interrupt, "KeyboardInterrupt"),
        (kill_leader_beside_a_stopped_follower, ""),
    ],
)
def test_all_ranks_end_with_the_reason(what: Callable[[int, int], None], said: str) -> None:
    with generating(SHORT_SECONDS if what is stop_follower else WAIT_SECONDS) as found:
        process, leader, follower = found
        files = shared_files(leader, follower)
        what(leader, follower)
        wait_for_ends(leader, follower)
        _, told = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode
    assert re.search(said, told)
    assert not any(file.exists() for file in files)


# It has to wait until the time is over.
@pytest.mark.slow
def test_a_hanging_rank_ends_a_program_that_steps_in_a_thread() -> None:
    with generating(SHORT_SECONDS, "thread") as (process, leader, follower):
        assert process.stdout is not None
        assert process.stdout.readline() == "generating\n", process.communicate()[1]
        stop_follower(leader, follower)
        wait_for_ends(leader, follower)
        _, told = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode
    assert re.search(r"error: Rank 0: .*rank 1 (hangs|did not come)", told)


@pytest.mark.slow
def test_a_lost_rank_is_known_without_a_request() -> None:
    with generating(600.0, "idle") as (process, _, follower):
        assert process.stdout is not None
        assert process.stdout.readline() == "no trouble\n"
        os.kill(follower, signal.SIGKILL)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert "trouble: rank 1 was lost" in errors
