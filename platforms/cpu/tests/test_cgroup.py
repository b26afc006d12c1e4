from pathlib import Path

from interposer_cpu._cgroup import MemoryLimit, cpu_limit, memory_limits

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_version_2_limits_are_read_with_file_pages_left_out(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/work"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/work",
            f"{group}/cpu.max": "150000 100000",
            f"{group}/memory.max": str(4 * GIB),
            f"{group}/memory.current": str(3 * GIB),
            f"{group}/memory.stat": f"anon 1\ninactive_file {GIB}",
        },
    )
    assert cpu_limit(root) == 2
    assert memory_limits(root) == [MemoryLimit(4 * GIB, 2 * GIB)]


def test_the_tightest_group_limits_processors_and_all_limit_memory(tmp_path: Path) -> None:
    outer, inner = "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b",
            f"{outer}/cpu.max": "100000 100000",
            f"{outer}/memory.max": str(2 * GIB),
            f"{outer}/memory.current": str(GIB),
            f"{inner}/cpu.max": "max 100000",
            f"{inner}/memory.max": "max",
            f"{inner}/memory.current": str(GIB),
        },
    )
    assert cpu_limit(root) == 1
    assert memory_limits(root) == [MemoryLimit(2 * GIB, GIB)]


def test_the_mounted_group_is_used_inside_a_container(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/host/only", "sys/fs/cgroup/cpu.max": "300000 100000"}
    assert cpu_limit(tree(tmp_path, files)) == 3


def test_version_1_limits_are_read(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/work\n3:cpu,cpuacct:/work\n1:name=systemd:/work",
            f"{mount}/cpu/work/cpu.cfs_quota_us": "250000",
            f"{mount}/cpu/work/cpu.cfs_period_us": "100000",
            f"{mount}/memory/work/memory.limit_in_bytes": str(GIB),
            f"{mount}/memory/work/memory.usage_in_bytes": "1000",
            f"{mount}/memory/work/memory.stat": "inactive_file 1\ntotal_inactive_file 400",
        },
    )
    assert cpu_limit(root) == 3
    assert memory_limits(root) == [MemoryLimit(GIB, 600)]


def test_version_1_groups_without_limits_give_none(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/",
            f"{mount}/cpu/cpu.cfs_quota_us": "-1",
            f"{mount}/cpu/cpu.cfs_period_us": "100000",
            f"{mount}/memory/memory.limit_in_bytes": "9223372036854771712",
            f"{mount}/memory/memory.usage_in_bytes": "1000",
        },
    )
    assert cpu_limit(root) is None
    assert memory_limits(root) == []


def test_a_system_without_groups_has_no_limits(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path) is None
    assert memory_limits(tmp_path) == []
