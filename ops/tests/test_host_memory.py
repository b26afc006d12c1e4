import copy
import mmap
import platform
import re
import sys
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from interposer import KVCacheLayout
from interposer_ops.devices import host_memory

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's madvise and /proc")
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc_trim")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    forget = host_memory._requested_bytes.cache_clear  # which a test may replace
    forget()
    yield
    forget()


class RecordedMap(mmap.mmap):
    """A map that records the advice which it gives the system: option, first address, bytes."""

    advice: list[tuple[int, int, int]]

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        num_bytes = len(self) - start if length is None else length
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr() + start
        self.advice.append((option, address, num_bytes))
        super().madvise(option, start, num_bytes)


class Maps:
    """All maps that the allocator made, and their advice."""

    def __init__(self) -> None:
        self.num_made = 0
        self.advice: list[tuple[int, int, int]] = []
        self._alive: weakref.WeakSet[RecordedMap] = weakref.WeakSet()

    def make(self, *arguments: int, **options: int) -> RecordedMap:
        memory = RecordedMap(*arguments, **options)
        memory.advice = self.advice
        self._alive.add(memory)
        self.num_made += 1
        return memory

    @property
    def num_alive(self) -> int:
        return len(self._alive)

    def advised_bytes(self, tensor: torch.Tensor, option: int) -> int:
        """Return the bytes of ``tensor`` that the system was given this advice for."""
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return sum(
            max(0, min(end, address + num_bytes) - max(first, address))
            for advised, address, num_bytes in self.advice
            if advised == option
        )

    def huge_bytes(self, tensor: torch.Tensor) -> int:
        return self.advised_bytes(tensor, mmap.MADV_HUGEPAGE)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Maps:
    """Record the maps of a test, with huge pages of 2 MiB, and share none with other tests."""
    maps = Maps()
    monkeypatch.setattr(mmap, "mmap", maps.make)
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 2 * MIB)
    monkeypatch.setattr(host_memory, "_shared_maps", host_memory._SharedMaps())
    return maps


def write(root: Path, name: str, text: str) -> None:
    path = root / "sys/kernel/mm/transparent_hugepage" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@linux
@pytest.mark.parametrize(("num_bytes", "advised"), [(2 * MIB, 2), (5 * MIB + 24, 4), (MIB, 0)])
def test_only_whole_huge_pages_are_requested(num_bytes: int, advised: int, maps: Maps) -> None:
    memory = host_memory.empty([num_bytes // 8, 2], torch.float32)
    assert memory.shape == (num_bytes // 8, 2)
    assert memory.untyped_storage().nbytes() == num_bytes
    assert memory.data_ptr() % 64 == 0
    assert maps.huge_bytes(memory) == advised * MIB
    memory.fill_(3)
    assert (memory == 3).all()
    assert torch.equal(copy.deepcopy(memory), memory)


@linux
def test_a_mapping_is_freed_with_its_last_view(maps: Maps) -> None:
    view = host_memory.empty([64 * MIB], torch.uint8)[5:]
    assert maps.num_alive == 1
    del view
    assert maps.num_alive == 0


@linux
def test_lasting_memory_shares_huge_pages(maps: Maps) -> None:
    sizes = [5 * MIB + 24, 300_000, 40 * MIB + 8, MIB, 20 * MIB]
    tensors = [host_memory.empty([size], torch.uint8, lasting=True) for size in sizes]
    for value, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        tensor.fill_(value)
        assert tensor.untyped_storage().nbytes() == size
        assert tensor.data_ptr() % 64 == 0
        assert maps.huge_bytes(tensor) == size
    assert maps.num_made == 2  # 32 MiB for four tensors, and one for the tensor of 40 MiB
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    assert torch.equal(copy.deepcopy(tensors[1]), tensors[1])


@linux
def test_huge_pages_larger_than_weights_are_not_shared(
    maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 512 * MIB)
    memory = host_memory.empty([40 * MIB], torch.uint8, lasting=True).fill_(1)
    assert maps.huge_bytes(memory) == 0
    assert memory.untyped_storage().nbytes() == 40 * MIB


SHARING = (9 * MIB + 100, 8 * MIB, 7 * MIB)  # bytes of tensors that lie in one map


@linux
def test_shared_memory_is_returned_while_neighbours_remain(maps: Maps) -> None:
    first, second, third = (
        host_memory.empty([size], torch.uint8, lasting=True).fill_(size % 7) for size in SHARING
    )
    view, address = second[5:], second.data_ptr()
    del second
    freed = mmap.MADV_DONTNEED
    assert not any(option == freed for option, _, _ in maps.advice)
    del view
    ((start, num_bytes),) = [entry[1:] for entry in maps.advice if entry[0] == freed]
    # All but the two pages that neighbours lie in as well.
    assert address <= start < address + mmap.PAGESIZE
    end = address + 8 * MIB
    assert end - mmap.PAGESIZE < start + num_bytes <= end
    assert maps.num_alive == 1
    assert (first == (9 * MIB + 100) % 7).all()
    assert (third == 7 * MIB % 7).all()
    del first, third
    assert maps.num_alive == 0


@linux
def test_concurrent_allocations_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 2 * MIB)
    sizes = range(300_000, 320_000, 1_000)
    filled: list[tuple[int, torch.Tensor]] = []

    def fill(value: int) -> None:
        for size in sizes:
            memory = host_memory.empty([size], torch.uint8, lasting=True)
            filled.append((value, memory.fill_(value)))

    threads = [Thread(target=fill, args=[value]) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 8 * len(sizes)
    assert all((memory == value).all() for value, memory in filled)


@linux
def test_freed_memory_is_reused_for_the_same_size_within_a_block(maps: Maps) -> None:
    with host_memory.reused():
        first = host_memory.empty([3, MIB], torch.int16).fill_(7)
        address = first.data_ptr()
        part = first[1]
        del first
        assert host_memory.empty([6, MIB], torch.uint8).data_ptr() != address  # a part is in use
        assert (part == 7).all()
        del part
        assert host_memory.empty([7, MIB], torch.uint8).data_ptr() != address
        before = maps.num_made
        again = host_memory.empty([6, MIB], torch.uint8)
        assert maps.num_made == before
        assert again.fill_(9).sum() == 9 * 6 * MIB
        thread = Thread(target=lambda: host_memory.empty([7, MIB], torch.uint8))
        thread.start()
        thread.join()
        assert maps.num_made == before + 1  # another thread takes no part
    assert (again == 9).all()  # what is in use stays after the block
    assert maps.num_alive == 1
    del again
    assert maps.num_alive == 0


@linux
def test_the_cache_of_freed_memory_is_limited(maps: Maps) -> None:
    def use(count: int) -> None:
        assert len([host_memory.empty([4 * MIB], torch.uint8) for _ in range(count)]) == count

    with host_memory.reused():
        use(5)
        assert (maps.num_made, maps.num_alive) == (5, 4)  # 16 MiB
        use(5)
        assert (maps.num_made, maps.num_alive) == (6, 4)
    assert maps.num_alive == 0


@linux
def test_trim_calls_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    padding: list[int] = []

    class Library:
        def __init__(self, _: object) -> None:
            self.malloc_trim = padding.append

    monkeypatch.setattr("ctypes.CDLL", Library)
    host_memory.trim()
    assert padding == [0]  # bytes to keep at the end of the heap


def test_trim_does_nothing_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> object:
        return object()  # a C library without malloc_trim

    monkeypatch.setattr("ctypes.CDLL", missing)
    host_memory.trim()
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("ctypes.CDLL", None)
    host_memory.trim()


def test_memory_comes_from_the_heap_if_mapping_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise OSError("no more maps")

    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 2 * MIB)
    monkeypatch.setattr(mmap, "mmap", denied)
    for lasting in (False, True):
        memory = host_memory.empty([4 * MIB], torch.uint8, lasting=lasting)
        assert memory.shape == (4 * MIB,)


@linux
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(
    ("setting", "advised"), [("madvise", 4), ("always", 4), ("never", 0), ("", 0)]
)
def test_huge_pages_are_requested_if_the_system_has_them(
    setting: str, advised: int, lasting: bool, maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(mmap, "mmap", maps.make)
    monkeypatch.setattr(host_memory, "_setting", lambda root: setting)
    monkeypatch.setattr(host_memory, "huge_page_bytes", lambda root=None: 2 * MIB)
    memory = host_memory.empty([4 * MIB], torch.uint8, lasting=lasting).fill_(1)
    assert maps.huge_bytes(memory) == advised * MIB


@linux
def test_caches_use_lasting_memory(maps: Maps) -> None:
    layout = KVCacheLayout((2, 2, 16, 64), 1, (0, 1, 2, 3, 4), torch.float32)
    caches = layout.allocate(2, 256, "cpu", host_memory.cache_memory)
    assert [maps.huge_bytes(cache) for cache in caches] == [4 * MIB, 4 * MIB]
    assert [cache.shape for cache in caches] == [(2, 256, 2, 16, 64)] * 2


@pytest.mark.parametrize(
    ("setting", "accepted", "reason"),
    [
        ("always [madvise] never", True, "of 2 MiB, for packed weights and caches"),
        ("[always] madvise never", True, "says 'always'"),
        ("always madvise [never]", False, "says 'never'; set 'madvise'"),
    ],
)
def test_the_verdict_reports_the_system_setting(
    tmp_path: Path, setting: str, accepted: bool, reason: str
) -> None:
    write(tmp_path, "enabled", setting)
    write(tmp_path, "hpage_pmd_size", "2097152")
    verdict = host_memory.huge_pages(tmp_path)
    assert verdict.accepted is accepted
    assert reason in verdict.reason
    assert host_memory.huge_page_bytes(tmp_path) == 2 * MIB


def test_other_systems_have_no_huge_pages(tmp_path: Path) -> None:
    assert "this system offers no huge pages" in host_memory.huge_pages(tmp_path).reason
    write(tmp_path, "enabled", "always [madvise] never")
    assert "the size of huge pages is unknown" in host_memory.huge_pages(tmp_path).reason
    assert host_memory.huge_page_bytes(tmp_path) == 0


# The tests below read the memory of this process as the system reports it. Each compares the
# allocator with a control: a plain map of the same size, used in the same way, in this process.


def advised_by_system(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor`` that the system lists as advised to lie in huge pages."""
    first, advised, inside = tensor.data_ptr(), 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            start, end = (int(address, 16) for address in span.groups())
            inside = max(0, min(end, first + tensor.nbytes) - max(start, first))
        elif line.startswith("VmFlags:") and "hg" in line.split():
            advised += inside
    return advised


def present_bytes(address: int, num_bytes: int) -> int:
    """Return how much of that memory the system holds, in memory or swapped.

    Source: proc_pid_pagemap(5), bits 63 and 62.
    """
    first, end = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = array("Q", file.read(8 * (end - first)))
    return sum(entry >> 62 != 0 for entry in entries) * mmap.PAGESIZE


def resident_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def advised_map(num_bytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    """Return a plain map that asks for huge pages, and its memory from a huge page's border on.

    Skips where the system gives no huge pages of at most 2 MiB on request.
    """
    huge_bytes = host_memory._requested_bytes()
    if not 0 < huge_bytes <= 2 * MIB:
        pytest.skip(f"needs huge pages of at most 2 MiB: {host_memory.huge_pages().reason}")
    size = num_bytes + huge_bytes
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    start = -view.data_ptr() % huge_bytes
    memory.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // huge_bytes * huge_bytes)
    return memory, view[start : start + num_bytes]


@linux
@pytest.mark.slow
def test_the_system_takes_the_advice() -> None:
    _, control = advised_map(64 * MIB)
    for lasting in (False, True):
        memory = host_memory.empty([64 * MIB], torch.uint8, lasting=lasting)
        assert advised_by_system(memory) == advised_by_system(control) > 0


@linux
@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True])
def test_memory_goes_back_to_the_system_with_the_tensor(lasting: bool) -> None:
    def rise_and_fall(make: Callable[[], torch.Tensor]) -> tuple[int, int]:
        before = resident_bytes()
        memory = make().fill_(1)
        full = resident_bytes()
        del memory
        return full - before, full - resident_bytes()

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    control, control_freed = rise_and_fall(
        lambda: torch.frombuffer(mmap.mmap(-1, 128 * MIB, flags=flags), dtype=torch.uint8)
    )
    risen, freed = rise_and_fall(
        lambda: host_memory.empty([128 * MIB], torch.uint8, lasting=lasting)
    )
    assert risen == pytest.approx(control, rel=0.1)
    assert freed == pytest.approx(control_freed, rel=0.1)
    assert freed == pytest.approx(risen, rel=0.1)


@linux
@pytest.mark.slow
def test_the_unused_part_of_a_shared_mapping_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "_shared_maps", host_memory._SharedMaps())
    _, control = advised_map(32 * MIB)
    control[: 24 * MIB + 1].fill_(1)
    tensors = [
        host_memory.empty([size], torch.uint8, lasting=True).fill_(1)
        for size in (10 * MIB, 14 * MIB + 1)
    ]
    assert tensors[1].data_ptr() == tensors[0].data_ptr() + tensors[0].nbytes
    remaining_bytes = 8 * MIB - 1
    present = present_bytes(tensors[1].data_ptr() + tensors[1].nbytes, remaining_bytes)
    expected = present_bytes(control.data_ptr() + control.nbytes - remaining_bytes, remaining_bytes)
    # The huge page that was begun may be whole, or consist of the small pages that were used.
    assert present <= expected + host_memory._requested_bytes()


@linux
@pytest.mark.slow
def test_the_system_takes_back_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_shared_maps", host_memory._SharedMaps())
    control_map, control = advised_map(32 * MIB)
    control.fill_(1)
    tensors = [host_memory.empty([size], torch.uint8, lasting=True).fill_(1) for size in SHARING]
    span = tensors[1].data_ptr(), tensors[1].nbytes
    within = tensors[1].data_ptr() - tensors[0].data_ptr()
    control_span = control.data_ptr() + within, tensors[1].nbytes
    assert present_bytes(*span) == present_bytes(*control_span)
    del tensors[1]
    start = control.data_ptr() - torch.frombuffer(control_map, dtype=torch.uint8).data_ptr()
    first = -(-(start + within) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + within + SHARING[1]) // mmap.PAGESIZE * mmap.PAGESIZE
    control_map.madvise(mmap.MADV_DONTNEED, first, end - first)
    # The system may make whole huge pages again of those at both ends, where neighbours lie.
    tolerance = 2 * host_memory._requested_bytes()
    assert present_bytes(*span) <= present_bytes(*control_span) + tolerance < SHARING[1]


@glibc
@pytest.mark.slow
def test_trim_returns_memory_between_remaining_tensors() -> None:
    sizes = [100 * 1024, 64] * 1000  # bytes; each large one is followed by one that stays
    before = resident_bytes()
    control = mmap.mmap(-1, sum(sizes[::2]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    torch.frombuffer(control, dtype=torch.uint8).fill_(1)
    expected = resident_bytes() - before
    memory = [torch.empty(size, dtype=torch.uint8).fill_(1) for size in sizes]
    full = resident_bytes()  # before they go: a heap with room elsewhere gives some back unasked
    del memory[::2]
    host_memory.trim()
    assert full - resident_bytes() > 0.6 * expected
    assert all((tensor == 1).all() for tensor in memory)
