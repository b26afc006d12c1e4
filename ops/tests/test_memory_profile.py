"""What a piece of work takes is told apart: torch's part and everybody else's."""

from __future__ import annotations

import tracemalloc

import pytest

from interposer_ops.devices.memory_profile import MemorySnapshot, memory_profile

TOTAL = 2**30


def host(_device: str) -> MemorySnapshot:
    """Return a snapshot of Python's allocations as torch's part of a device of 1 GiB."""
    used_bytes, peak = tracemalloc.get_traced_memory()
    return MemorySnapshot(TOTAL - used_bytes - 1000, TOTAL, used_bytes, peak)


def test_a_profile_compares_after_with_before() -> None:
    tracemalloc.start()
    try:
        with memory_profile("cpu", host, lambda _: tracemalloc.reset_peak()) as profile:
            assert profile.torch_bytes == 0
            passing = bytearray(5_000_000)
            del passing
            memory = bytearray(1_000_000)
    finally:
        tracemalloc.stop()
    assert len(memory) <= profile.torch_bytes < len(memory) + 100_000
    assert profile.other_bytes == 0
    assert profile.after.peak_bytes - profile.before.peak_bytes >= 4_900_000


def test_other_bytes_exclude_the_allocator() -> None:
    snapshot = MemorySnapshot(free_bytes=50, total_bytes=100, reserved_bytes=30, peak_bytes=25)
    assert snapshot.other_bytes == 20


def test_free_memory_accounts_for_the_peak_and_other_users() -> None:
    after = MemorySnapshot(free_bytes=50, total_bytes=100, reserved_bytes=30, peak_bytes=25)

    class Failed(Exception):
        pass

    with pytest.raises(Failed), memory_profile("cpu", lambda _: after, lambda _: None) as profile:
        raise Failed
    assert profile.after == after
    assert profile.room_bytes(0.9) == 90 - 25 - 20
    assert profile.room_bytes(0.1) == 0
