import os
from pathlib import Path

import pytest

from interposer import Memory
from interposer_cpu import _host as host

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    meminfo = f"MemTotal: {8 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {6 * GIB >> 10} kB"
    write(tmp_path / "proc/meminfo", meminfo)
    assert host.memory(tmp_path) == Memory(total_bytes=8 * GIB, free_bytes=6 * GIB)


def test_memory_stays_within_the_group(tmp_path: Path) -> None:
    meminfo = f"MemTotal: {8 * GIB >> 10} kB\nMemAvailable: {6 * GIB >> 10} kB"
    write(tmp_path / "proc/meminfo", meminfo)
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/memory.max", str(2 * GIB))
    write(tmp_path / "sys/fs/cgroup/memory.current", str(3 * GIB))
    assert host.memory(tmp_path) == Memory(total_bytes=2 * GIB, free_bytes=0)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="needs os.sysconf")
def test_memory_without_proc_is_read_by_sysconf(tmp_path: Path) -> None:
    found = host.memory(tmp_path)
    assert found.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found.free_bytes <= found.total_bytes


def test_memory_is_zero_if_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf_names", raising=False)
    assert host.memory(tmp_path) == Memory(total_bytes=0, free_bytes=0)


def test_usable_cores_are_limited_by_affinity_and_quota(tmp_path: Path) -> None:
    allowed = len(host.allowed_processors())
    assert host.usable_cores(tmp_path) == allowed
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "50000 100000")
    assert host.usable_cores(tmp_path) == 1
    write(tmp_path / "sys/fs/cgroup/cpu.max", "99900000 100000")
    assert host.usable_cores(tmp_path) == allowed


def test_a_system_without_affinity_uses_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert host.allowed_processors() == list(range(os.cpu_count() or 1))


def test_caches_are_named_by_level(tmp_path: Path) -> None:
    folder = tmp_path / f"sys/devices/system/cpu/cpu{host.allowed_processors()[0]}/cache"
    caches = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M")]
    for index, (level, kind, size) in enumerate(caches):
        write(folder / f"index{index}/level", level)
        write(folder / f"index{index}/type", kind)
        write(folder / f"index{index}/size", size)
    assert host.caches_bytes(tmp_path) == {"l1d": 48 << 10, "l2": 2 << 20}


def test_caches_are_empty_where_unknown(tmp_path: Path) -> None:
    assert host.caches_bytes(tmp_path) == {}


def test_numa_nodes_are_read_in_order(tmp_path: Path) -> None:
    for node, processors in {"node10": "8", "node0": "0-2,5", "node1": ""}.items():
        write(tmp_path / f"sys/devices/system/node/{node}/cpulist", processors)
    assert list(host.numa_nodes(tmp_path).items()) == [(0, [0, 1, 2, 5]), (10, [8])]


def test_one_numa_node_where_unknown(tmp_path: Path) -> None:
    assert host.numa_nodes(tmp_path) == {0: host.allowed_processors()}


@pytest.mark.parametrize("key", ["model name", "cpu model"])
def test_processor_name_is_the_model(tmp_path: Path, key: str) -> None:
    write(tmp_path / "proc/cpuinfo", f"processor\t: 0\n{key}\t: Some Processor 9000")
    assert host.processor_name(tmp_path) == "Some Processor 9000"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c", "ARM Neoverse-N1"),
        ("CPU implementer\t: 0xc0\nCPU part\t: 0xac3", "Ampere AmpereOne"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xfff", "ARM part 0xfff"),
        ("CPU implementer\t: 0x99\nCPU part\t: 0x001", "ARM designer 0x99 part 0x001"),
        ("processor 0: version = FF,  identification = 0,  machine = 8561", "IBM z15"),
        ("processor 0: version = FF,  identification = 0,  machine = 1234", "IBM machine 1234"),
    ],
)
def test_arm_and_s390x_processors_are_named_by_their_numbers(
    tmp_path: Path, lines: str, name: str
) -> None:
    write(tmp_path / "proc/cpuinfo", lines)
    assert host.processor_name(tmp_path) == name


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_processors_are_grouped_by_core(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "allowed_processors", lambda: [0, 1, 2, 4, 5])
    for processor, together in enumerate(["0,4", "1,5", "2,6", "3,7", "0,4", "1,5"]):
        write(tmp_path / f"sys/devices/system/cpu/cpu{processor}/topology/{file}", together)
    assert host.cores(tmp_path) == [[0, 4], [1, 5], [2]]


def test_every_processor_is_a_core_where_unknown(tmp_path: Path) -> None:
    assert host.cores(tmp_path) == [[processor] for processor in host.allowed_processors()]


def test_numbers_are_listed_in_ranges() -> None:
    assert host.listed([5, 0, 1, 2, 8, 9]) == "0-2,5,8-9"
    assert host.listed([]) == ""


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("proc/sys/kernel/osrelease", "4.4.0-19041-Microsoft", 1),
        ("proc/sys/kernel/osrelease", "4.19.84-microsoft-standard", 2),
        ("proc/sys/kernel/osrelease", "5.15.90.1-microsoft-standard-WSL2", 2),
        ("proc/version", "Linux version 4.4.0-18362-Microsoft (Microsoft@Microsoft.com)", 1),
        ("proc/sys/kernel/osrelease", "6.1.0-13-amd64", 0),
        ("proc/sys/kernel/nothing", "", 0),
    ],
)
def test_wsl_is_known_by_its_kernel(tmp_path: Path, file: str, text: str, version: int) -> None:
    write(tmp_path / file, text)
    assert host.wsl(tmp_path) == version


def test_processor_name_is_never_empty(tmp_path: Path) -> None:
    assert host.processor_name(tmp_path)
