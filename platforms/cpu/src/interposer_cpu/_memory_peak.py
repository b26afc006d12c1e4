"""Current and peak resident memory of this process, as Linux counts it.

Source: proc_pid_status(5), VmRSS and VmHWM, in units of 1024 bytes; proc_pid_clear_refs(5): writing
5 resets the peak to the current resident size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from interposer import Verdict
from interposer_cpu import _host as host
from interposer_ops.devices.memory_profile import MemorySnapshot

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def judge_peak(status: Path = _STATUS, reset: Path = _RESET) -> Verdict:
    """Accept if the system records peak memory and lets this process reset the peak."""
    if "VmHWM" not in _sizes(status):
        return Verdict.refuse("this system does not count the peak of a process's memory")
    try:
        reset_peak(file=reset)
    except OSError as error:
        return Verdict.refuse(f"the peak of this process's memory cannot be reset: {error}")
    return Verdict.accept()


def memory_snapshot(_device: str) -> MemorySnapshot:
    """Measure the host's free and total memory and this process's resident and peak memory."""
    sizes, memory = _sizes(_STATUS), host.memory()
    return MemorySnapshot(
        memory.free_bytes, memory.total_bytes, sizes.get("VmRSS", 0), sizes.get("VmHWM", 0)
    )


def reset_peak(_device: str = "cpu", file: Path = _RESET) -> None:
    """Reset the recorded peak resident size to the current size."""
    file.write_text("5", encoding="ascii")


def _sizes(status: Path) -> Mapping[str, int]:
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    # A line is, for example, "VmRSS:     1234 kB".
    pairs = (line.split() for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in pairs}
