"""Device memory that a piece of work takes: torch's allocator, and everything else.

Graphs, library workspaces, communication and other processes take memory unknown to torch's
allocator, so a cache sized by the allocator alone would overflow.

The arithmetic is tested; reading an accelerator was never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["MemoryProfile", "MemorySnapshot", "memory_profile", "memory_snapshot"]


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Memory in use on one device at one moment, in bytes.

    Attributes:
        free_bytes, total_bytes: of the device, over all users.
        reserved_bytes: reserved by torch's allocator, in use or cached.
        peak_bytes: largest sum of tensor memory since the peak was reset.
    """

    free_bytes: int
    total_bytes: int
    reserved_bytes: int
    peak_bytes: int

    @property
    def other_bytes(self) -> int:
        """Memory in use outside torch's allocator, in bytes, such as other processes' memory."""
        return self.total_bytes - self.free_bytes - self.reserved_bytes


@dataclass(slots=True)
class MemoryProfile:
    """Memory snapshots before and after a ``with`` block; equal until the block ends."""

    before: MemorySnapshot
    after: MemorySnapshot

    @property
    def torch_bytes(self) -> int:
        """Growth of the memory that torch's allocator reserves, in bytes."""
        return self.after.reserved_bytes - self.before.reserved_bytes

    @property
    def other_bytes(self) -> int:
        """Growth of the memory outside torch's allocator, in bytes."""
        return self.after.other_bytes - self.before.other_bytes

    def room_bytes(self, share: float = 0.9) -> int:
        """Return the bytes left for a KV cache if peak use may reach ``share`` of the device.

        The peak of torch's tensors counts, not the allocator's cache; memory of others counts in
        full. 0 if nothing is free.
        """
        limit = int(self.after.total_bytes * share)
        return max(limit - self.after.peak_bytes - self.after.other_bytes, 0)


def memory_snapshot(device: str) -> MemorySnapshot:
    """Measure the memory of ``device`` without waiting for queued work."""
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
        snapshot, reset_peak: functions that read the memory and reset its peak.
    """
    reset_peak(device)
    before = snapshot(device)
    profile = MemoryProfile(before, before)
    try:
        yield profile
    finally:
        # Also after an error: the memory that led to a failure is the interesting one.
        profile.after = snapshot(device)
