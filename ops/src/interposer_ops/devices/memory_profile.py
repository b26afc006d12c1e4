"""The memory of a device that a piece of work takes: torch's part of it, and everybody else's.

Graphs, workspaces of libraries, communication and other processes take memory that torch's
allocator does not know of, so that a cache which is sized by the allocator alone overflows.

The arithmetic is tested; reading an accelerator was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["MemoryProfile", "MemorySnapshot", "memory_profile", "memory_snapshot"]


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Bytes of one device at one moment.

    Attributes:
        free_bytes, total_bytes: of the device, whoever uses it.
        reserved_bytes: taken by torch's allocator, in use or kept.
        peak_bytes: the most that tensors have used since the peak was reset.
    """

    free_bytes: int
    total_bytes: int
    reserved_bytes: int
    peak_bytes: int

    @property
    def other_bytes(self) -> int:
        """The memory in use besides torch's allocator: contexts, libraries, other processes."""
        return self.total_bytes - self.free_bytes - self.reserved_bytes


@dataclass(slots=True)
class MemoryProfile:
    """Two snapshots; ``after`` is that of the end, and equals ``before`` until then."""

    before: MemorySnapshot
    after: MemorySnapshot

    @property
    def torch_bytes(self) -> int:
        """By how much torch's allocator has grown."""
        return self.after.reserved_bytes - self.before.reserved_bytes

    @property
    def other_bytes(self) -> int:
        """By how much has grown what is not torch's."""
        return self.after.other_bytes - self.before.other_bytes

    def room_bytes(self, share: float = 0.9) -> int:
        """Return what may still be taken, so that ``share`` of the device is used at the peak.

        The peak of torch's tensors counts, not what it keeps of them, and what others have taken
        counts in full. 0 where nothing is left.
        """
        limit = int(self.after.total_bytes * share)
        return max(limit - self.after.peak_bytes - self.after.other_bytes, 0)


def memory_snapshot(device: str) -> MemorySnapshot:
    """Return what ``device`` holds now; work that is queued counts as far as it has allocated."""
    free, total = torch.accelerator.get_memory_info(device)
    return MemorySnapshot(
        free,
        total,
        torch.accelerator.memory_reserved(device),
        torch.accelerator.max_memory_allocated(device),
    )


@contextmanager
def memory_profile(
    device: str,
    snapshot: Callable[[str], MemorySnapshot] = memory_snapshot,
    reset_peak: Callable[[str], None] = torch.accelerator.reset_peak_memory_stats,
) -> Iterator[MemoryProfile]:
    """Compare the memory of ``device`` before and after a ``with`` block.

    Args:
        snapshot, reset_peak: how the memory is read, and its peak forgotten.
    """
    reset_peak(device)
    before = snapshot(device)
    profile = MemoryProfile(before, before)
    try:
        yield profile
    finally:
        profile.after = snapshot(device)
