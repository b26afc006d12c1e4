"""The peak of a block of code on the host, or the reason why there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from interposer_cpu import CPUPlatform
from interposer_cpu._memory_peak import judge_peak, reset_peak

linux = pytest.mark.skipif(
    not CPUPlatform.provides("memory_profile"), reason="needs a system that tells a peak"
)


# In a process of its own: memory that others gave back to the heap is taken there at no cost. The
# control is how much the system reports for a plain tensor of 200 MiB there.
PROFILED = """
import json, torch
from interposer_cpu import CPUPlatform
from interposer_cpu._memory_peak import memory_snapshot
platform, mib = CPUPlatform(), 2**20
before = torch.ones(400 * mib, dtype=torch.uint8)
del before  # a peak of before the block, which is not its own
with platform.memory_profile("cpu") as profile:
    kept = torch.ones(50 * mib, dtype=torch.uint8)
    passing = torch.ones(150 * mib, dtype=torch.uint8)
    del passing
before = memory_snapshot("cpu").reserved_bytes
control = torch.ones(200 * mib, dtype=torch.uint8)
print(json.dumps({
    "control": memory_snapshot("cpu").reserved_bytes - before,
    "taken": profile.after.peak_bytes - profile.before.peak_bytes,
    "torch": profile.torch_bytes,
    "total": [profile.after.total_bytes, platform.memory("cpu").total_bytes],
    "free": profile.after.free_bytes,
    "room": profile.room_bytes(1.0),
}))
"""


@linux
@pytest.mark.process
@pytest.mark.slow
def test_freed_memory_counts_at_the_peak() -> None:
    printed = subprocess.run([sys.executable, "-c", PROFILED], stdout=subprocess.PIPE, check=True)
    found = json.loads(printed.stdout)
    control = found["control"]
    assert found["taken"] == pytest.approx(control, rel=0.15)
    assert 0.2 * control < found["torch"] < 0.5 * control  # 50 MiB are kept
    assert found["total"][0] == found["total"][1]
    # The peak has to fit next to the memory of others, though it is over.
    assert found["free"] - control < found["room"] < found["free"]


def test_memory_profile_is_refused_if_the_system_counts_no_peak(tmp_path: Path) -> None:
    status = tmp_path / "status"
    expected = "this system does not count the peak of a process's memory"
    assert judge_peak(status).reason == expected
    status.write_text("Name: python\nVmRSS:\t  512 kB\n")
    assert judge_peak(status).reason == expected
    status.write_text("VmHWM:\t  2048 kB\nVmRSS:\t  512 kB\n")
    refused = judge_peak(status, tmp_path / "missing" / "clear_refs")
    assert refused.reason.startswith("the peak of this process's memory cannot be reset: [Errno 2]")
    own = tmp_path / "clear_refs"
    assert judge_peak(status, own)
    assert own.read_text() == "5"
    with pytest.raises(OSError, match="missing"):
        reset_peak(file=tmp_path / "missing" / "clear_refs")
