"""Files of packed weights: safetensors files whose data starts at a huge-page boundary.

The header has a fixed size, so that memory can be packed into the file before the header is known.
Each tensor of the file is the memory of tensors of layers. The metadata describe the layers, with a
checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from interposer import CheckpointFile, Verdict
from interposer.records import Kernel
from interposer.tooling import canonical_json, checksum, open_owned, warn_if_shared
from interposer_engine._checkpoint.files import Checkpoint, sampled_digest
from interposer_engine._kv_cache_budget import is_host
from interposer_engine._packed.header_check import (
    check_fields,
    check_findings,
    check_memories,
    check_states,
    check_texts,
)
from interposer_engine._plan import Plan

FORMAT = 2
"""Format version of a packed file. Increase the number when the meaning of a file changes."""

HEADER_BYTES = 2 << 20
_METADATA = "__metadata__"
_MAGIC = "interposer"
_SIGNATURE = "signature"
_LENGTH_BYTES = 8
_CAN_MAP = hasattr(mmap, "MAP_PRIVATE")
_WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)
_ADVICE_BYTES = 128 << 10  # one advice makes Linux read no more than its read-ahead size


class PackedFileError(Exception):
    """A file of packed weights cannot be used; the text says why."""


class BeingWrittenError(PackedFileError):
    """Another process, or another model of this process, is writing the packed file."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Metadata of a file of packed weights.

    Attributes:
        asked: ``PackedKey.requested`` when the file was written. Files store this field name.
        made_by: versions of kernels and packages that the packed bytes depend on.
        states: the states of each layer, by the number of its group; see ``StateWriter``.
        memories: ``(first byte, number of bytes)`` of each memory, counted from the end of the
            header.
        digests: SHA-256 of each memory.
        non_finite: findings of the weight check, a line for each tensor; None if the check was off.
    """

    asked: dict[str, str]
    made_by: dict[str, str]
    states: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    memories: list[tuple[int, int]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    non_finite: list[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the metadata as plain values for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def write_header(file: int, facts: Facts, num_bytes: int, secret: bytes | None) -> None:
    """Write the header of an open packed file with ``num_bytes`` of data.

    Args:
        secret: signs the header; None writes no signature.
    Raises: PackedFileError: the header is too large, or invalid.
    """
    try:
        _check(facts, num_bytes)
    except ValueError as error:
        raise PackedFileError(f"its states have no form that can be checked: {error}") from error
    encoded = json.dumps(_header(facts, num_bytes, secret), separators=(",", ":")).encode()
    capacity = HEADER_BYTES - _LENGTH_BYTES
    if len(encoded) > capacity:
        raise PackedFileError(f"its header takes {len(encoded)} bytes, more than {capacity}")
    os.pwrite(file, capacity.to_bytes(_LENGTH_BYTES, "little") + encoded.ljust(capacity), 0)


def _header(facts: Facts, num_bytes: int, secret: bytes | None) -> dict[str, Any]:
    value = {**facts.to_json(), "format": FORMAT}
    text = json.dumps(value, separators=(",", ":"))
    metadata = {_MAGIC: text, "checksum": checksum(value)}
    if secret is not None:
        metadata[_SIGNATURE] = _signature(metadata["checksum"], secret)
    return {_METADATA: metadata, **_tensors(facts, num_bytes)}


def _tensors(facts: Facts, num_bytes: int) -> dict[str, Any]:
    """Return tensor storages as safetensors entries, which must cover the data without gaps."""
    starts = [start for start, _ in facts.memories]
    order = sorted(range(len(starts)), key=starts.__getitem__)
    edges = [0, *(starts[number] for number in order[1:]), num_bytes]
    return {
        str(number): {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for number, begin, end in zip(order, edges, edges[1:], strict=False)
    }


def _signature(digest: str, secret: bytes) -> str:
    return hmac.new(secret, digest.encode(), "sha256").hexdigest()


def _check(facts: Facts, num_bytes: int) -> None:
    """Refuse invalid metadata of a packed file: texts, storages, digests, states or findings.

    Raises: ValueError: with the first fault.
    """
    check_texts("asked", facts.asked)
    check_texts("made_by", facts.made_by)
    check_findings(facts.non_finite)
    check_memories(facts.memories, facts.digests, num_bytes)
    check_states(facts.states, facts.memories)


def _read_header(file: int) -> dict[str, Any]:
    """Read the header of a packed file, and disable read-ahead for the data.

    Raises:
        PackedFileError: the file is truncated.
        ValueError: the header has another format.
    """
    # Without read-ahead: data of several GiB follow the header.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    content = bytearray()
    while len(content) < HEADER_BYTES and (
        part := os.pread(file, HEADER_BYTES - len(content), len(content))
    ):
        content += part
    if int.from_bytes(content[:_LENGTH_BYTES], "little") != HEADER_BYTES - _LENGTH_BYTES:
        raise ValueError("its header has another length")
    if len(content) < HEADER_BYTES:
        raise PackedFileError("it is truncated or corrupt: it ends in its header")
    header = json.loads(content[_LENGTH_BYTES:].decode())
    if type(header) is not dict or type(header.get(_METADATA)) is not dict:
        raise ValueError("its header has no metadata")
    return header


class MappedMemory:
    """The tensor storages of an open packed file, as tensors in memory-mapped pages.

    A change to a tensor is visible in this process only.

    Args:
        ahead: let the system read the complete file soon.
    """

    def __init__(self, file: int, memories: list[tuple[int, int]], ahead: bool = True) -> None:
        if not _CAN_MAP:
            raise PackedFileError("this system maps no files that a program may change for itself")
        size = os.fstat(file).st_size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._memories = memories
        # Private and writable: layers may write to tensors, and the file must stay unchanged.
        self._map = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=protection)
        for advice in ("MADV_HUGEPAGE", "MADV_WILLNEED")[: 1 + ahead]:
            with suppress(OSError):  # without the advice, pages are read at first access
                if (number := getattr(mmap, advice, None)) is not None:
                    self._map.madvise(number)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return the tensor storage with this number as a uint8 tensor."""
        start, num_bytes = self._memories[number]
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        # A storage for each memory: code that compares storages must not see memories as aliases.
        return torch.frombuffer(
            self._map, dtype=torch.uint8, count=num_bytes, offset=HEADER_BYTES + start
        )

    def advise(self, number: int, start: int = 0, stop: int | None = None) -> None:
        """Let the operating system start to read a part of a tensor storage, and no other pages.

        Args:
            start: first byte in the memory; a negative number means 0.
            stop: end in the memory; None or a larger number means the end of the memory.
        """
        memory_start, num_bytes = self._memories[number]
        start, stop = max(start, 0), num_bytes if stop is None else min(stop, num_bytes)
        if _WILL_NEED is None or stop <= start:
            return
        first = (HEADER_BYTES + memory_start + start) // mmap.PAGESIZE * mmap.PAGESIZE
        last = HEADER_BYTES + memory_start + stop
        with suppress(OSError):  # without the advice, pages are read at first access
            for begin in range(first, last, _ADVICE_BYTES):
                self._map.madvise(_WILL_NEED, begin, min(_ADVICE_BYTES, last - begin))

    def scatter(self, numbers: Iterable[int]) -> None:
        """Disable read-ahead for tensor storages, except where ``advise`` was called.

        By default the system would also read the neighbouring pages, up to ``read_ahead_kb``.
        """
        spans: list[list[int]] = []  # merged, as neighbouring memories share pages
        for memory_start, num_bytes in sorted(self._memories[number] for number in numbers):
            if spans and memory_start < spans[-1][1] + mmap.PAGESIZE:
                spans[-1][1] = memory_start + num_bytes
            else:
                spans.append([memory_start, memory_start + num_bytes])
        for begin, end in spans:
            # Only pages that lie entirely inside the span.
            first = -(-(HEADER_BYTES + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (HEADER_BYTES + end) // mmap.PAGESIZE * mmap.PAGESIZE - first
            for advice in ("MADV_NOHUGEPAGE", "MADV_RANDOM"):
                advice_number: int | None = getattr(mmap, advice, None)
                if advice_number is not None and size > 0:
                    with suppress(OSError):
                        self._map.madvise(advice_number, first, size)

    def digests(self) -> Iterator[str]:
        """Yield the SHA-256 digest of each tensor storage."""
        with memoryview(self._map) as content:
            for start, num_bytes in self._memories:
                first = HEADER_BYTES + start
                with content[first : first + num_bytes] as part:
                    yield hashlib.sha256(part).hexdigest()


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file of packed weights whose header is valid.

    Attributes:
        identity: device, inode and size of the file; None: not compared.
        is_of_root: root owns the file, and this process belongs to another user.
        signature: signature of ``digest``, "" without one.
        digest: checksum of the header.
    """

    path: Path
    facts: Facts
    identity: tuple[int, int, int] | None = None
    is_of_root: bool = False
    signature: str = ""
    digest: str = ""

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Open a packed file, and check its header.

        Raises: PackedFileError: the file is truncated, corrupt, of another format, not a regular
            file, or owned by another user.
        """
        try:
            file = open_owned(path)
        except (OSError, ValueError) as error:
            raise PackedFileError(f"it cannot be used: {error}") from error
        try:
            status = os.fstat(file)
            header = _read_header(file)
            return cls._of(path, status, header)
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            kind = type(error).__name__
            raise PackedFileError(f"it holds no packed weights: {kind}: {error!s:.400}") from error
        finally:
            os.close(file)

    @classmethod
    def _of(cls, path: Path, status: os.stat_result, header: dict[str, Any]) -> PackedFile:
        metadata = header[_METADATA]
        value = json.loads(metadata[_MAGIC])
        if checksum(value) != metadata["checksum"]:
            raise PackedFileError("it is corrupt: its header and the checksum of that differ")
        version = value.get("format") if type(value) is dict else None
        if type(version) is not int or version != FORMAT:
            raise PackedFileError(f"it has format {version!r:.80}, this version reads {FORMAT}")
        fields = check_fields(value, {**Facts.__dataclass_fields__, "format": None})
        del fields["format"]
        facts, num_bytes = Facts(**fields), status.st_size - HEADER_BYTES
        try:
            _check(facts, num_bytes)
        except ValueError as error:
            raise PackedFileError(
                f"it is corrupt: its header contradicts the file: {error}"
            ) from error
        facts.memories[:] = [(start, size) for start, size in facts.memories]
        tensors = {name: entry for name, entry in header.items() if name != _METADATA}
        # The safetensors entries are redundant, but other programs read them.
        if canonical_json(tensors) != canonical_json(_tensors(facts, num_bytes)):
            raise PackedFileError("it is corrupt: tensors and memories of its header differ")
        identity = (status.st_dev, status.st_ino, status.st_size)
        signature = str(metadata.get(_SIGNATURE, ""))
        is_of_root = hasattr(os, "getuid") and status.st_uid == 0 != os.getuid()
        return cls(path, facts, identity, is_of_root, signature, metadata["checksum"])

    def is_signed(self, secret: bytes) -> bool:
        """Say whether the writer of the header knew the secret of this user's cache."""
        signature = _signature(self.digest, secret)
        return hmac.compare_digest(signature.encode(), self.signature.encode())

    def memory(self, ahead: bool = True) -> MappedMemory:
        """Map the tensor storages of the packed file into this process.

        Args:
            ahead: let the system read the complete file soon.
        Raises: PackedFileError: the file cannot be mapped, or was replaced by another file.
        """
        try:
            file = open_owned(self.path)
            try:
                status = os.fstat(file)
                identity = (status.st_dev, status.st_ino, status.st_size)
                # The path may name another file than the one whose header was checked.
                if self.identity not in (None, identity):
                    raise PackedFileError("another file took its place while it was opened")
                return MappedMemory(file, self.facts.memories, ahead)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise PackedFileError(f"it cannot be mapped: {error}") from error

    def check(self) -> None:
        """Read the complete packed file, and verify the checksums.

        Raises: PackedFileError: a memory differs from its checksum.
        """
        digests = list(self.memory().digests())
        num_wrong = sum(
            digest != expected for digest, expected in zip(digests, self.facts.digests, strict=True)
        )
        if num_wrong:
            raise PackedFileError(
                f"it is corrupt: {num_wrong} of {len(digests)} memories differ from their checksums"
            )


_PARTS = (
    "interposer-engine",
    "interposer-models",
    "interposer-ops",
    "interposer-quantization",
)


@dataclass(frozen=True, slots=True)
class PackedKey:
    """Key of packed weights: all facts that determine the packed bytes, as texts by name.

    Attributes:
        requested: checkpoint, form and CPU level. Files with other values can exist side by side.
        made_by: versions of kernels and packages. A new version replaces the file.
    """

    requested: dict[str, str]
    made_by: dict[str, str]

    @property
    def address(self) -> str:
        """File name of the packed weights: a digest of ``requested``."""
        return checksum(self.requested)[:32]


def judge_layouts(planned: Plan) -> Verdict:
    """Accept a plan if each kernel that packs weights declares the layout of its constants."""
    placement = planned.placement
    if not is_host(placement.platform):
        return Verdict.refuse(f"memory of {placement.platform.name} maps no files")
    for choice, _ in planned.resolver.choices.values():
        record = choice.chosen.record
        if isinstance(record, Kernel) and record.prepare and not record.layout:
            return Verdict.refuse(
                f"{choice.chosen.qualified_name} prepares constants and states no layout of them"
            )
    return Verdict.accept()


def packed_key(planned: Plan, checkpoint: Checkpoint | CheckpointFile) -> PackedKey:
    """Return the key of a plan's packed weights."""
    capability = planned.placement.device.capability
    config = planned.resolver.config
    requested = {
        "checkpoint": _identity(checkpoint),
        "config": checksum(_text(checkpoint.config)),
        "dtype": str(planned.dtype),
        "quantization": _text(planned.quantization),
        "platform": planned.placement.platform.name,
        "level": " ".join([capability.architecture, sys.byteorder, *sorted(capability.features)]),
        "numerics": f"{config.float32} {config.reduce_in_16_bits} {config.dequantize}",
    }
    if (ranks := planned.resolver.ranks) is not None:
        requested["share"] = f"{ranks.rank} of {ranks.size}"
    registry, made_by = planned.resolver.registry, {"torch": str(torch.__version__)}
    distributions = {*_PARTS}
    for choice, prefixes in planned.resolver.choices.values():
        request, chosen = choice.request, choice.chosen
        if request.kind == "platform":
            continue  # part of ``requested``
        distributions.add(chosen.provider)
        layout = getattr(chosen.record, "layout", 0)
        location = checksum([list(map(str, request.key)), prefixes])[:12]
        made_by[f"{request.kind} {request.name} ({location})"] = (
            f"{chosen.qualified_name} {chosen.version}" + f", layout {layout}" * bool(layout)
        )
    for plugin in registry.plugins.loaded:
        if plugin.distribution in distributions:
            installed = plugin.source.installed
            # The fingerprint of the installed files: a version may be edited in place.
            code = "" if installed is None else f" ({installed.fingerprint[:16]})"
            made_by[f"code of {plugin.distribution}"] = f"{plugin.version}{code}"
    return PackedKey(requested, made_by)


def difference(packed: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Describe the first difference between the facts of a file and of a key; "" if equal."""
    for name in sorted({*packed, *current}):
        if packed.get(name) != current.get(name):
            before, now = packed.get(name, "nothing"), current.get(name, "nothing")
            return f"it was packed for another {name}: {before:.200}, not {now:.200}"
    return ""


def _identity(checkpoint: Checkpoint | CheckpointFile) -> str:
    files = checkpoint.shards if isinstance(checkpoint, Checkpoint) else (checkpoint.path,)
    return "; ".join(map(_file_identity, files))


def _file_identity(path: Path) -> str:
    """Return a file's name, size, modification time, and a digest of samples of its content."""
    facts = path.stat()
    return f"{path.name}, {facts.st_size} bytes, {facts.st_mtime_ns}, {sampled_digest(path)}"


def _text(value: object) -> str:
    """Return ``value`` as canonical JSON text; numbers in configurations may be infinite."""
    return json.dumps(value, sort_keys=True, default=str)


_SEGMENT_BYTES = 32 << 20
_HUGE_BYTES = 2 << 20
_ALIGNED_BYTES = 64


class PackedWriter:
    """Writer of a new packed file next to the final path; one process can write at a time.

    The file is written under a temporary name, which nothing reads, so that the next writer can
    overwrite the remains of a process that ended.

    Args:
        secret: signs the header; None writes no signature.
    Raises: PackedFileError: the file cannot be created; BeingWrittenError: another process is
        writing it.
    """

    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        self.path = path
        self._secret = secret
        self._part_path = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_owned(self._part_path, writes=True)
        except OSError as error:
            raise PackedFileError(f"{path.parent} cannot be written: {error}") from error
        warn_if_shared(path.parent)
        try:
            _lock(self._file, self._part_path)
            os.ftruncate(self._file, 0)
        except BaseException:
            os.close(self._file)
            raise
        self.memories: list[tuple[int, int]] = []
        self._end = 0
        self._memory: MappedMemory | None = None
        self._segment: mmap.mmap | None = None
        self._segment_start = self._segment_end = 0
        # Mapped segments as (map, first address, end address, offset in the data).
        self._segments: list[tuple[weakref.ref[mmap.mmap], int, int, int]] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the next ``num_bytes`` of the packed file, to be written, as a uint8 tensor.

        Raises: PackedFileError: the disk is full.
        """
        if self._segment is None or self._end + num_bytes > self._segment_end:
            self._start_segment(num_bytes)
        assert self._segment is not None
        offset = self._end - self._segment_start
        memory = torch.frombuffer(self._segment, dtype=torch.uint8, count=num_bytes, offset=offset)
        self._end += -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return memory

    def place(self, num_bytes: int, lasting: bool) -> torch.Tensor | None:
        """Return memory for a packed tensor, or for a large temporary tensor during packing.

        Temporary tensors of a large vocabulary would be most of the anonymous memory, which a
        system without swap cannot reclaim. Such tensors lie in an unnamed file instead.

        Args:
            lasting: the memory is for a packed tensor.
        Returns: None if the caller must allocate the memory.
        Raises: PackedFileError: the disk is full.
        """
        if lasting:
            return self.take(num_bytes)
        if num_bytes < _SEGMENT_BYTES:
            return None
        size = -(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES
        try:
            with TemporaryFile(dir=self.path.parent) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise PackedFileError(f"{self.path.parent} cannot be written: {error}") from error
        _ask_for_huge_pages(memory)
        return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)

    def keep(self, memory: torch.Tensor) -> int:
        """Add a uint8 tensor to the file, copied if it lies elsewhere; return its number.

        Raises: PackedFileError: the disk is full.
        """
        num_bytes = memory.nbytes
        start = self._offset_of(memory.data_ptr()) if num_bytes else 0
        if start is None:
            start = -(-self._end // _ALIGNED_BYTES) * _ALIGNED_BYTES
            copy = self.take(num_bytes)
            start = self._offset_of(copy.data_ptr())
            copy.copy_(memory)
        assert start is not None
        self.memories.append((start, num_bytes))
        return len(self.memories) - 1

    def memory(self) -> MappedMemory:
        """Map all tensor storages that ``keep`` has added, and end writing."""
        if self._memory is None:
            self._segment = None
            os.ftruncate(self._file, HEADER_BYTES + self._end)
            self._memory = MappedMemory(self._file, self.memories)
        return self._memory

    def publish(self, facts: Facts) -> None:
        """Write checksums and header, sync the file to the disk, and rename the file.

        Raises: PackedFileError: the file cannot be written.
        """
        try:
            facts.digests[:] = self.memory().digests()
            write_header(self._file, facts, self._end, self._secret)
            # Data must reach the disk before the name: a crash must not publish a corrupt file.
            os.fsync(self._file)
            self._part_path.replace(self.path)
        except OSError as error:
            raise PackedFileError(f"{self.path} cannot be written: {error}") from error

    def close(self) -> None:
        """Release the packed file for other writers; remove an unpublished file."""
        if self._file >= 0:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._file), self._part_path.lstat()):
                    self._part_path.unlink()
            os.close(self._file)
            self._file = -1

    def _start_segment(self, num_bytes: int) -> None:
        # Map the last huge page again, so that the next memory follows without a gap.
        start = self._end // _HUGE_BYTES * _HUGE_BYTES
        needed = self._end - start + num_bytes
        size = -(-max(needed, _SEGMENT_BYTES) // _HUGE_BYTES) * _HUGE_BYTES
        self._segment = None
        try:
            # Reserve disk space: writing to a mapped page on a full disk would kill the process.
            os.posix_fallocate(self._file, HEADER_BYTES + start, size)
            self._segment = mmap.mmap(self._file, size, offset=HEADER_BYTES + start)
        except OSError as error:
            raise PackedFileError(f"{self._part_path} cannot be written: {error}") from error
        _ask_for_huge_pages(self._segment)
        address = torch.frombuffer(self._segment, dtype=torch.uint8).data_ptr()
        # A segment is unmapped when the last tensor in it is gone; addresses are reused then.
        mapped = [segment for segment in self._segments if segment[0]() is not None]
        self._segments = [*mapped, (weakref.ref(self._segment), address, address + size, start)]
        self._segment_start, self._segment_end = start, start + size

    def _offset_of(self, address: int) -> int | None:
        for segment, begin, end, start in self._segments:
            if begin <= address < end and segment() is not None:
                return start + address - begin
        return None


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        raise PackedFileError("this system locks no files") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_same_file = os.path.samestat(os.fstat(file), path.lstat())
    except OSError as error:
        raise BeingWrittenError(f"another process writes {path}") from error
    if not is_same_file:  # published meanwhile, so that the path has another name
        raise BeingWrittenError(f"another process has just written {path}")
