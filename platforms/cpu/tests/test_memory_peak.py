"""The peak of a block of code on the host, or why it cannot be told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from interposer_cpu import CPUPlatform
from interposer_cpu._memory_peak import judge_peak, reset_peak

MIB = 2**20

linux = pytest.mark.skipif(
    not CPUPlatform.provides("memory_profile"), reason="needs a system that tells a peak"
)


# In a process of its own: memory that others gave back to the heap is taken there at no cost.
PROFILED = """
import json, torch
from interposer_cpu import CPUPlatform
platform, mib = CPUPlatform(), 2**20
before = torch.ones(400 * mib, dtype=torch.uint8)
del before  # a peak of before the block, which is not its own
with platform.memory_profile("cpu") as profile:
    kept = torch.ones(50 * mib, dtype=torch.uint8)
    passing = torch.ones(150 * mib, dtype=torch.uint8)
    del passing
print(json.dumps({
    "taken": profile.after.peak_bytes - profile.before.peak_bytes,
    "torch": profile.torch_bytes,
    "total": [profile.after.total_bytes, platform.memory("cpu").total_bytes],
    "free": profile.after.free_bytes,
    "room": profile.room_bytes(1.0),
}))
"""


@linux
def test_what_is_given_back_counts_at_the_peak() -> None:
    printed = subprocess.run([sys.executable, "-c", PROFILED], stdout=subprocess.PIPE, check=True)
    found = json.loads(printed.stdout)
    assert 190 * MIB < found["taken"] < 230 * MIB
    assert 50 * MIB <= found["torch"] + 5 * MIB < 100 * MIB
    assert found["total"][0] == found["total"][1]
    # The peak has to fit beside what others use, though it is over.
    assert found["free"] - 200 * MIB < found["room"] < found["free"]


def test_without_a_count_there_is_no_profile(tmp_path: Path) -> None:
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
