"""The communicator through shared memory: the kit, and ranks that are lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from interposer import current_platform, current_registry
from interposer_testing import conformance

WORKER = Path(__file__).with_name("rank_worker.py")
# One worker starts the processes, so that few ranks run at a time.
pytestmark = [pytest.mark.native, pytest.mark.xdist_group("ranks")]


@contextmanager
def ranks(
    scene: str, size: int, folder: Path, *options: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks of a scene of ``rank_worker``, and end what is left of them."""
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scene, str(rank), str(size), str(folder), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def told(process: subprocess.Popen[str]) -> Any:
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit
        time.sleep(0.01)


# All cases of the distribution are made for the few that are run.
@pytest.mark.slow
def test_the_kit_finds_nothing_in_two_and_four_processes() -> None:
    platform = current_platform()
    registry = current_registry()
    trials = [
        trial
        for trial in conformance(registry, platform.devices()[0], distribution="interposer-cpu")
        if trial.candidate.name == "shared_memory" and trial.verdict
    ]
    assert len(trials) > 15
    faults = {trial.label: found for trial in trials if (found := trial.run())}
    assert not faults


@pytest.mark.slow
def test_a_fused_norm_has_the_bits_of_its_parts_also_when_compiled(tmp_path: Path) -> None:
    with ranks("norm", 2, tmp_path) as processes:
        assert [told(process) for process in processes] == [{"same": 30, "compiled": 1}] * 2


def test_ranks_are_told_at_once_of_one_that_was_killed(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    with ranks("killed", 3, tmp_path) as processes:
        for rank in range(3):
            wait_for(tmp_path / f"ready{rank}")
        processes[1].send_signal(signal.SIGKILL)
        began = time.monotonic()
        for rank in (0, 2):
            found = told(processes[rank])
            assert found["lost"] == [1]
            assert "rank 1 ended its process" in found["reason"]
            assert found["again"] == found["reason"]
            # Both sleep for at most 0.1 s; a busy machine takes its time.
            assert found["at"] - began < 1.0
    left = set(Path("/dev/shm").glob("interposer-*"))
    assert not left - before


def test_ctrl_c_ends_a_wait_and_the_others_are_told(tmp_path: Path) -> None:
    with ranks("interrupted", 2, tmp_path) as processes:
        wait_for(tmp_path / "ready0")
        time.sleep(0.1)
        processes[0].send_signal(signal.SIGINT)
        wait_for(tmp_path / "told")  # rank 0 stays until it may go
        (tmp_path / "go").touch()
        assert told(processes[0]) == {"raised": "KeyboardInterrupt"}
        assert "rank 0 was interrupted by a signal" in told(processes[1])["reason"]


def test_a_sleeping_rank_costs_no_processor(tmp_path: Path) -> None:
    with ranks("idle", 2, tmp_path) as processes:
        found = [told(process) for process in processes]
    assert found[0]["waited"] > 0.9
    assert found[0]["processor"] < 0.1
    assert [one["sum"] for one in found] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("place", "fails"), [("memfd", False), ("shm", False), ("temporary", False), ("none", True)]
)
def test_memory_is_shared_where_it_can_be(place: str, fails: bool, tmp_path: Path) -> None:
    with ranks("place", 2, tmp_path, place) as processes:
        for process in processes:
            found = told(process)
            if fails:
                assert "--shm-size" in found["reason"]
                assert "no room" in found["reason"]
            else:
                assert found == {"sum": 3.0, "left": []}


def test_ranks_that_call_different_things_are_told(tmp_path: Path) -> None:
    with ranks("differ", 2, tmp_path) as processes:
        for process in processes:
            assert "calls another collective" in told(process)["reason"]


@pytest.mark.slow
def test_a_million_small_sums_are_right(tmp_path: Path) -> None:
    with ranks("million", 2, tmp_path) as processes:
        assert [told(process) for process in processes] == [{"wrong": 0}] * 2
