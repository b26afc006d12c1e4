import multiprocessing
from pathlib import Path

import pytest
import torch

from interposer_cpu import _facts as facts
from interposer_cpu import _host as host
from interposer_cpu import native

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_every_fact_is_a_sentence_of_this_machine() -> None:
    found = facts.facts()
    assert [*found] == [
        "native kernels",
        "processors",
        "threads",
        "memory",
        "huge pages",
        "processes",
    ]
    assert all(found.values())
    assert found["processors"].startswith(host.listed(host.allowed_processors()))
    assert native.level() in found["native kernels"]


def test_processes_are_spawned_in_wsl(tmp_path: Path) -> None:
    own = multiprocessing.get_all_start_methods()[0]
    assert facts.start_method(tmp_path) == own
    assert facts.facts(tmp_path)["processes"] == f"are started by {own}"
    write(tmp_path / "proc/sys/kernel/osrelease", "5.15.90.1-microsoft-standard-WSL2")
    assert facts.start_method(tmp_path) == "spawn"
    assert "WSL 2" in facts.facts(tmp_path)["processes"]


def test_facts_warn_of_more_threads_than_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    allowed = len(host.allowed_processors())
    assert (
        f"the affinity of this process grants the time of {allowed}"
        in (facts.facts(tmp_path)["threads"])
    )
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "100000 100000")
    told = facts.facts(tmp_path)["threads"]
    assert "64, but a control group" in told or allowed == 1
    assert told.endswith("Try: OMP_NUM_THREADS=1")


def test_facts_mention_a_memory_limit(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", f"MemTotal: {8 * GIB >> 10} kB\nMemAvailable: 4194304 kB")
    assert facts.facts(tmp_path)["memory"] == "4.0 GiB free of 8.0 GiB"
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/memory.max", str(2 * GIB))
    write(tmp_path / "sys/fs/cgroup/memory.current", str(GIB))
    told = facts.facts(tmp_path)["memory"]
    assert told == "1.0 GiB free of 2.0 GiB, which is the limit of a control group"
