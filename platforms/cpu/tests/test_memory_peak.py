"""The peak of a block of code on the host, or why it cannot be told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from interposer_cpu import CPUPlatform
from interposer_cpu._memory_peak import judge_peak, reset_peak

MIB = 2**20

linux = pytest.mark.skipif(
    not CPUPlatform.provides("memory_profile"), reason="needs a system that tells a peak"
)


@linux
def test_what_is_given_back_counts_at_the_peak() -> None:
    platform = CPUPlatform()
    before = torch.ones(400 * MIB, dtype=torch.uint8)
    del before  # a peak of before the block, which is not its own
    with platform.memory_profile("cpu") as profile:
        kept = torch.ones(50 * MIB, dtype=torch.uint8)
        passing = torch.ones(150 * MIB, dtype=torch.uint8)
        del passing
    taken = profile.after.peak_bytes - profile.before.peak_bytes
    assert 190 * MIB < taken < 230 * MIB
    assert len(kept) <= profile.torch_bytes + 5 * MIB < 100 * MIB
    assert profile.after.total_bytes == platform.memory("cpu").total_bytes
    # The peak has to fit beside what others use, though it is over.
    free = profile.after.free_bytes
    assert free - 200 * MIB < profile.room_bytes(1.0) < free


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
