"""The communicator through shared memory: the kit, and ranks that are lost."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.forks import forks
from tests.landing import landing_sample
from tests.waiting import WAIT_SECONDS, wait_until

from interposer import current_platform, current_registry
from interposer_testing import conformance

ROOT = Path(__file__).parents[3]
WORKER = "platforms.cpu.tests.rank_worker"
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
# One worker starts the processes, so that few ranks run at a time.
pytestmark = [pytest.mark.native, pytest.mark.process, pytest.mark.xdist_group("ranks")]


@contextmanager
def ranks(
    scene: str, size: int, folder: Path, *options: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks of a scene of ``rank_worker``, and end the remaining ones afterwards."""
    started = [
        subprocess.Popen(
            forks().command("-m", WORKER, scene, str(rank), str(size), folder, *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
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
    out, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


def wait_for(path: Path) -> None:
    wait_until(path.exists, f"the file {path}")


def pid_of(rank: int, folder: Path) -> int:
    """Wait until a rank is ready, and return its process id; ``ranks`` has those of clients."""
    ready = folder / f"ready{rank}"
    wait_for(ready)
    return int(ready.read_text())


def wait_for_sleep(pid: int) -> None:
    """Wait until the main thread of a rank sleeps on a futex that other processes share.

    That is the library's futex; Python's locks are private to the process.
    """

    def sleeps() -> bool:
        number, *arguments = Path(f"/proc/{pid}/syscall").read_text().split()
        return number == str(FUTEX) and arguments[1] == "0x0"  # FUTEX_WAIT without FUTEX_PRIVATE

    wait_until(sleeps, f"the sleep of process {pid}")


def shows_calls() -> bool:
    """Check whether the system shows the current system call of a child process."""
    if FUTEX is None or not Path("/proc/self/syscall").exists():
        return False
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        try:
            return bool(Path(f"/proc/{child.pid}/syscall").read_text())
        except PermissionError:
            return False


needs_calls = pytest.mark.skipif("not shows_calls()", reason="needs Linux's /proc/PID/syscall")


# All cases of the distribution are made for the few that are run.
@pytest.mark.slow
def test_the_conformance_kit_passes_with_two_and_four_ranks() -> None:
    platform = current_platform()
    registry = current_registry()
    trials = [
        trial
        for trial in conformance(registry, platform.devices()[0], distribution="interposer-cpu")
        if trial.candidate.name == "shared_memory" and trial.verdict
    ]
    assert len(trials) > 15
    faults = {trial.label: report for trial in trials if (report := trial.run())}
    assert not faults


@pytest.mark.slow
def test_fused_all_reduce_norm_equals_its_parts_bit_for_bit_also_compiled(tmp_path: Path) -> None:
    with ranks("norm", 2, tmp_path) as processes:
        assert [told(process) for process in processes] == [{"same": 30, "compiled": 1}] * 2


def test_a_killed_rank_is_reported_to_the_other_ranks(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    with ranks("killed", 3, tmp_path) as processes:
        pids = [pid_of(rank, tmp_path) for rank in range(3)]
        os.kill(pids[1], signal.SIGKILL)
        for rank in (0, 2):
            report = told(processes[rank])
            assert report["lost"] == [1]
            assert "rank 1 ended its process" in report["reason"]
            assert report["again"] == report["reason"]
    left = set(Path("/dev/shm").glob("interposer-*"))
    assert not left - before


@pytest.mark.slow
@needs_calls
def test_ctrl_c_ends_a_wait_and_is_reported_to_the_other_ranks(tmp_path: Path) -> None:
    with ranks("interrupted", 2, tmp_path) as processes:
        pid = pid_of(0, tmp_path)
        wait_for_sleep(pid)
        os.kill(pid, signal.SIGINT)
        wait_for(tmp_path / "told")  # rank 0 stays until it may go
        (tmp_path / "go").touch()
        assert told(processes[0]) == {"raised": "KeyboardInterrupt"}
        assert "rank 0 was interrupted by a signal" in told(processes[1])["reason"]


@pytest.mark.slow
@needs_calls
def test_a_waiting_rank_sleeps_until_the_others_arrive(tmp_path: Path) -> None:
    with ranks("idle", 2, tmp_path) as processes:
        wait_for_sleep(pid_of(0, tmp_path))
        (tmp_path / "go").touch()
        assert [told(process) for process in processes] == [{"sum": 3.0}] * 2


@pytest.mark.parametrize(
    ("place", "fails"),
    landing_sample(
        [("memfd", False), ("shm", False), ("temporary", False), ("none", True)], every=3
    ),
)
def test_ranks_use_the_first_place_that_can_share_memory(
    place: str, fails: bool, tmp_path: Path
) -> None:
    with ranks("place", 2, tmp_path, place) as processes:
        for process in processes:
            report = told(process)
            if fails:
                assert "--shm-size" in report["reason"]
                assert "no room" in report["reason"]
            else:
                assert report == {"sum": 3.0, "left": []}


def test_mismatched_collective_calls_are_reported(tmp_path: Path) -> None:
    with ranks("differ", 2, tmp_path) as processes:
        for process in processes:
            assert "calls another collective" in told(process)["reason"]


@pytest.mark.slow
def test_a_million_small_all_reduces_are_correct(tmp_path: Path) -> None:
    with ranks("million", 2, tmp_path) as processes:
        assert [told(process) for process in processes] == [{"wrong": 0}] * 2
