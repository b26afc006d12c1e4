import copy
import mmap
import platform
import re
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from interposer import KVCacheLayout
from interposer_ops.devices import host_memory

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/smaps")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    forget = host_memory._requested_bytes.cache_clear  # which a test may replace
    forget()
    yield
    forget()


def write(root: Path, name: str, text: str) -> None:
    path = root / "sys/kernel/mm/transparent_hugepage" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def advised_bytes(tensor: torch.Tensor) -> int:
    """Return how much of a tensor's memory the system was told about, from its list of maps."""
    first, advised, inside = tensor.data_ptr(), 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            start, end = (int(bound, 16) for bound in span.groups())
            inside = max(0, min(end, first + tensor.nbytes) - max(start, first))
        elif line.startswith("VmFlags:") and "hg" in line.split():
            advised += inside
    return advised


def present_bytes(address: int, num_bytes: int) -> int:
    """Return how much of that memory the system holds, as proc_pid_pagemap(5) says, bit 63."""
    first, end = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = array("Q", file.read(8 * (end - first)))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@linux
@pytest.mark.parametrize(("num_bytes", "advised"), [(2 * MIB, 2), (5 * MIB + 24, 4), (MIB, 0)])
def test_whole_huge_pages_are_asked_for_and_no_more(
    num_bytes: int, advised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 2 * MIB)
    memory = host_memory.empty([num_bytes // 8, 2], torch.float32)
    assert memory.shape == (num_bytes // 8, 2)
    assert memory.untyped_storage().nbytes() == num_bytes
    assert memory.data_ptr() % 64 == 0
    assert advised_bytes(memory) == advised * MIB
    memory.fill_(3)
    assert (memory == 3).all()
    assert torch.equal(copy.deepcopy(memory), memory)


def is_mapped(address: int, num_bytes: int) -> bool:
    """Return whether one map holds all of it: a buffer of this reading may lie in a part."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in maps]
    return any(start <= address and address + num_bytes <= end for start, end in spans)


@linux
def test_memory_goes_back_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 2 * MIB)
    view = host_memory.empty([64 * MIB], torch.uint8)[5:]
    span = view.data_ptr(), view.nbytes
    assert is_mapped(*span)
    del view
    assert not is_mapped(*span)


@linux
def test_what_lasts_shares_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 2 * MIB)
    sizes = [5 * MIB + 24, 300_000, 40 * MIB + 8, MIB, 20 * MIB]
    tensors = [host_memory.empty([size], torch.uint8, lasting=True) for size in sizes]
    for value, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        tensor.fill_(value)
        assert tensor.untyped_storage().nbytes() == size
        assert tensor.data_ptr() % 64 == 0
        assert advised_bytes(tensor) == size
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    # The third one has a map of its own; the others leave 5.7 of the 32 MiB of theirs.
    rest = present_bytes(tensors[-1].data_ptr() + tensors[-1].nbytes, 5 * MIB)
    # It is no memory, but for that of the huge page that was begun, in whole small pages.
    assert rest <= 2 * MIB
    assert torch.equal(copy.deepcopy(tensors[1]), tensors[1])


@linux
def test_huge_pages_larger_than_weights_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 512 * MIB)
    memory = host_memory.empty([40 * MIB], torch.uint8, lasting=True).fill_(1)
    assert advised_bytes(memory) == 0
    assert memory.untyped_storage().nbytes() == 40 * MIB


@linux
def test_shared_memory_goes_back_before_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 2 * MIB)
    # What other tests keep would keep a map that these tensors share with it.
    monkeypatch.setattr(host_memory, "_shared_maps", host_memory._SharedMaps())
    first, second, third = (
        host_memory.empty([size], torch.uint8, lasting=True).fill_(size % 7)
        for size in (9 * MIB + 100, 8 * MIB, 7 * MIB)
    )
    spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in (first, second, third)]
    view = second[5:]
    del second
    assert present_bytes(*spans[1]) >= 8 * MIB
    del view
    assert present_bytes(*spans[1]) <= 2 * mmap.PAGESIZE  # those that neighbours lie in as well
    assert (first == (9 * MIB + 100) % 7).all()
    assert (third == 7 * MIB % 7).all()
    del first, third
    assert not any(is_mapped(*span) for span in spans)


@linux
def test_threads_never_share_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_is_freed_in_a_block_serves_the_next_of_its_size() -> None:
    with host_memory.reused():
        first = host_memory.empty([3, MIB], torch.int16).fill_(7)
        address = first.data_ptr()
        part = first[1]
        del first
        assert host_memory.empty([6, MIB], torch.uint8).data_ptr() != address  # a part is in use
        assert (part == 7).all()
        del part
        assert host_memory.empty([7, MIB], torch.uint8).data_ptr() != address
        again = host_memory.empty([6, MIB], torch.uint8)
        assert again.data_ptr() == address
        assert again.fill_(9).sum() == 9 * 6 * MIB
        others: list[int] = []
        thread = Thread(
            target=lambda: others.append(host_memory.empty([7, MIB], torch.uint8).data_ptr())
        )
        thread.start()
        thread.join()
    assert (again == 9).all()  # what is in use stays behind the block
    assert is_mapped(address, 6 * MIB)
    del again
    assert not is_mapped(address, 6 * MIB)
    assert not is_mapped(others[0], 7 * MIB)


@linux
def test_no_more_is_kept_than_layers_need() -> None:
    def addresses(count: int) -> set[int]:
        tensors = [host_memory.empty([4 * MIB], torch.uint8) for _ in range(count)]
        return {tensor.data_ptr() for tensor in tensors}

    with host_memory.reused():
        before = addresses(5)
        kept = [address for address in before if is_mapped(address, 4 * MIB)]
        assert len(kept) == 4
        assert set(kept) <= addresses(5)
    assert not any(is_mapped(address, 4 * MIB) for address in kept)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc_trim")
def test_trim_gives_back_what_lies_between_tensors_that_stay() -> None:
    sizes = [100 * 1024, 64] * 1000  # bytes; each large one is followed by one that stays
    memory = [torch.empty(size, dtype=torch.uint8).fill_(1) for size in sizes]
    full = resident_bytes()  # before they go: a heap with room elsewhere gives some back unasked
    del memory[::2]
    host_memory.trim()
    assert full - resident_bytes() > 60 * MIB
    assert all((tensor == 1).all() for tensor in memory)


def test_other_systems_are_not_asked_to_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> object:
        return object()  # a C library without malloc_trim

    monkeypatch.setattr("ctypes.CDLL", missing)
    host_memory.trim()
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("ctypes.CDLL", None)
    host_memory.trim()


def test_a_system_that_denies_the_map_gives_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_huge_pages_are_asked_for_where_the_system_has_them(
    setting: str, advised: int, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_setting", lambda root: setting)
    monkeypatch.setattr(host_memory, "huge_page_bytes", lambda root=None: 2 * MIB)
    memory = host_memory.empty([4 * MIB], torch.uint8, lasting=lasting).fill_(1)
    assert advised_bytes(memory) == advised * MIB


@linux
def test_caches_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_requested_bytes", lambda: 2 * MIB)
    layout = KVCacheLayout((2, 2, 16, 64), 1, (0, 1, 2, 3, 4), torch.float32)
    caches = layout.allocate(2, 256, "cpu", host_memory.cache_memory)
    assert [advised_bytes(cache) for cache in caches] == [4 * MIB, 4 * MIB]
    assert [cache.shape for cache in caches] == [(2, 256, 2, 16, 64)] * 2


@pytest.mark.parametrize(
    ("setting", "accepted", "said"),
    [
        ("always [madvise] never", True, "of 2 MiB, for packed weights and caches"),
        ("[always] madvise never", True, "says 'always'"),
        ("always madvise [never]", False, "says 'never'; 'madvise' lets"),
    ],
)
def test_what_the_system_allows_is_said(
    tmp_path: Path, setting: str, accepted: bool, said: str
) -> None:
    write(tmp_path, "enabled", setting)
    write(tmp_path, "hpage_pmd_size", "2097152")
    verdict = host_memory.huge_pages(tmp_path)
    assert verdict.accepted is accepted
    assert said in verdict.reason
    assert host_memory.huge_page_bytes(tmp_path) == 2 * MIB


def test_other_systems_have_none(tmp_path: Path) -> None:
    assert "this system has none" in host_memory.huge_pages(tmp_path).reason
    write(tmp_path, "enabled", "always [madvise] never")
    assert "how large" in host_memory.huge_pages(tmp_path).reason
    assert host_memory.huge_page_bytes(tmp_path) == 0
