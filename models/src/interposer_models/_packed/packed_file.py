"""Packed weights in a file: safetensors, whose data begin where a huge page of the file does.

The header is of one size, so that memory can be packed before it is known what there will be. Each
tensor of the file is the memory of tensors of layers, which the metadata tell with a checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from interposer.tooling import canonical_json, checksum, open_owned
from interposer_models._packed.header_check import (
    check_fields,
    check_findings,
    check_memories,
    check_states,
    check_texts,
)

FORMAT = 2
"""Changes with what a file of ours means."""

HEADER_BYTES = 2 << 20
_METADATA = "__metadata__"
_MAGIC = "interposer"
_SIGNATURE = "signature"
_LENGTH_BYTES = 8
_CAN_MAP = hasattr(mmap, "MAP_PRIVATE")
_WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)
_ADVICE_BYTES = 128 << 10  # Linux reads no more for one advice than it would read ahead


class PackedFileError(Exception):
    """A packed file cannot be used; the text says why."""


class BeingWrittenError(PackedFileError):
    """Another process, or another model of this one, writes the file."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a packed file.

    Attributes:
        asked: what was to be packed, of which a checkpoint may have several forms.
        made_by: what else the bytes depend on.
        states: of each layer, by the number of its group; see ``layer_states``.
        memories: first byte and number of bytes of each memory, behind the header.
        digests: SHA-256 of each.
        non_finite: what the check of weights found, a line for each tensor; None: it was off.
    """

    asked: dict[str, str]
    made_by: dict[str, str]
    states: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    memories: list[tuple[int, int]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    non_finite: list[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def write_header(file: int, facts: Facts, num_bytes: int, secret: bytes | None) -> None:
    """Write the header of an open file with so many bytes behind it.

    Args:
        secret: signs it; None writes none.
    Raises: PackedFileError: there is too much to say, or readers would refuse it.
    """
    try:
        _check(facts, num_bytes)
    except ValueError as error:
        raise PackedFileError(f"its states have no form that can be checked: {error}") from error
    encoded = json.dumps(_header(facts, num_bytes, secret), separators=(",", ":")).encode()
    room = HEADER_BYTES - _LENGTH_BYTES
    if len(encoded) > room:
        raise PackedFileError(f"its header takes {len(encoded)} bytes, more than {room}")
    os.pwrite(file, room.to_bytes(_LENGTH_BYTES, "little") + encoded.ljust(room), 0)


def _header(facts: Facts, num_bytes: int, secret: bytes | None) -> dict[str, Any]:
    value = {**facts.to_json(), "format": FORMAT}
    text = json.dumps(value, separators=(",", ":"))
    metadata = {_MAGIC: text, "checksum": checksum(value)}
    if secret is not None:
        metadata[_SIGNATURE] = _signature(metadata["checksum"], secret)
    return {_METADATA: metadata, **_tensors(facts, num_bytes)}


def _tensors(facts: Facts, num_bytes: int) -> dict[str, Any]:
    """Return the memories as tensors of safetensors, which have no gaps between them."""
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
    """Refuse facts that no writer writes.

    Raises: ValueError: with the first fault.
    """
    check_texts("asked", facts.asked)
    check_texts("made_by", facts.made_by)
    check_findings(facts.non_finite)
    check_memories(facts.memories, facts.digests, num_bytes)
    check_states(facts.states, facts.memories)


def _read_header(file: int) -> dict[str, Any]:
    """Return the header, and let the system read nothing behind it.

    Raises:
        PackedFileError: the file is cut off.
        ValueError: it is no header of ours.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    read = bytearray()
    while len(read) < HEADER_BYTES and (
        part := os.pread(file, HEADER_BYTES - len(read), len(read))
    ):
        read += part
    if int.from_bytes(read[:_LENGTH_BYTES], "little") != HEADER_BYTES - _LENGTH_BYTES:
        raise ValueError("its header has another length")
    if len(read) < HEADER_BYTES:
        raise PackedFileError("it is truncated or corrupt: it ends in its header")
    header = json.loads(read[_LENGTH_BYTES:].decode())
    if type(header) is not dict or type(header.get(_METADATA)) is not dict:
        raise ValueError("its header has no metadata")
    return header


class MappedMemory:
    """The memories of an open file as tensors, whose pages all processes share.

    What is written to one stays in this process.

    Args:
        ahead: the system is to read all of it soon.
    """

    def __init__(self, file: int, memories: list[tuple[int, int]], ahead: bool = True) -> None:
        if not _CAN_MAP:
            raise PackedFileError("this system maps no files that a program may change for itself")
        size = os.fstat(file).st_size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._memories = memories
        self._map = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=protection)
        for advice in ("MADV_HUGEPAGE", "MADV_WILLNEED")[: 1 + ahead]:
            with suppress(OSError):  # it is read all the same, by and by
                if (number := getattr(mmap, advice, None)) is not None:
                    self._map.madvise(number)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return the memory of that number, uint8."""
        start, num_bytes = self._memories[number]
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        # Of one storage each: who compares storages is to find those apart that are.
        return torch.frombuffer(
            self._map, dtype=torch.uint8, count=num_bytes, offset=HEADER_BYTES + start
        )

    def advise(self, number: int, start: int = 0, stop: int | None = None) -> None:
        """Let the system begin to read a part of a memory, and nothing beside its pages.

        Args:
            start: first byte in the memory; less than 0 is its beginning.
            stop: byte behind the last one; None, or beyond the end, is the end.
        """
        at, num_bytes = self._memories[number]
        start, stop = max(start, 0), num_bytes if stop is None else min(stop, num_bytes)
        if _WILL_NEED is None or stop <= start:
            return
        first = (HEADER_BYTES + at + start) // mmap.PAGESIZE * mmap.PAGESIZE
        last = HEADER_BYTES + at + stop
        with suppress(OSError):  # it is read all the same, by and by
            for begin in range(first, last, _ADVICE_BYTES):
                self._map.madvise(_WILL_NEED, begin, min(_ADVICE_BYTES, last - begin))

    def scatter(self, numbers: Iterable[int]) -> None:
        """Let the system read single pages of memories where it was not advised.

        By its own rules it would read what lies around them, as far as ``read_ahead_kb`` says.
        """
        spans: list[list[int]] = []  # memories that follow each other share pages
        for at, num_bytes in sorted(self._memories[number] for number in numbers):
            if spans and at < spans[-1][1] + mmap.PAGESIZE:
                spans[-1][1] = at + num_bytes
            else:
                spans.append([at, at + num_bytes])
        for begin, end in spans:
            first = -(-(HEADER_BYTES + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (HEADER_BYTES + end) // mmap.PAGESIZE * mmap.PAGESIZE - first
            for advice in ("MADV_NOHUGEPAGE", "MADV_RANDOM"):
                known: int | None = getattr(mmap, advice, None)
                if known is not None and size > 0:
                    with suppress(OSError):
                        self._map.madvise(known, first, size)

    def digests(self) -> Iterator[str]:
        """Yield the SHA-256 of each memory."""
        with memoryview(self._map) as whole:
            for start, num_bytes in self._memories:
                first = HEADER_BYTES + start
                with whole[first : first + num_bytes] as part:
                    yield hashlib.sha256(part).hexdigest()


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file whose header was read and is sound.

    Attributes:
        identity: device, inode and size of the file whose header was read; None: any.
        is_of_root: root owns it, and this process is of another user.
        signature: of the header, "" without one.
        digest: of the header, which ``signature`` signs.
    """

    path: Path
    facts: Facts
    identity: tuple[int, int, int] | None = None
    is_of_root: bool = False
    signature: str = ""
    digest: str = ""

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Return the file at ``path``.

        Raises: PackedFileError: it is cut off, corrupt, of another format, no regular file, or of
            another user.
        """
        try:
            file = open_owned(path)
        except (OSError, ValueError) as error:
            raise PackedFileError(f"it cannot be used: {error}") from error
        try:
            facts = os.fstat(file)
            header = _read_header(file)
            return cls._of(path, facts, header)
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
        tensors = {name: each for name, each in header.items() if name != _METADATA}
        if canonical_json(tensors) != canonical_json(_tensors(facts, num_bytes)):
            raise PackedFileError("it is corrupt: tensors and memories of its header differ")
        identity = (status.st_dev, status.st_ino, status.st_size)
        signature = str(metadata.get(_SIGNATURE, ""))
        is_of_root = hasattr(os, "getuid") and status.st_uid == 0 != os.getuid()
        return cls(path, facts, identity, is_of_root, signature, metadata["checksum"])

    def is_signed(self, secret: bytes) -> bool:
        """Return True if a process that knows the secret wrote the header."""
        signature = _signature(self.digest, secret)
        return hmac.compare_digest(signature.encode(), self.signature.encode())

    def memory(self, ahead: bool = True) -> MappedMemory:
        """Return its memories, mapped, to be read ``ahead`` of their use or not.

        Raises: PackedFileError: it cannot be mapped, or another file has taken its place.
        """
        try:
            file = open_owned(self.path)
            try:
                facts = os.fstat(file)
                identity = (facts.st_dev, facts.st_ino, facts.st_size)
                if self.identity not in (None, identity):
                    raise PackedFileError("another file took its place while it was opened")
                return MappedMemory(file, self.facts.memories, ahead)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise PackedFileError(f"it cannot be mapped: {error}") from error

    def check(self) -> None:
        """Read it all.

        Raises: PackedFileError: a memory differs from its checksum.
        """
        found = list(self.memory().digests())
        wrong = [
            i
            for i, pair in enumerate(zip(found, self.facts.digests, strict=True))
            if len({*pair}) > 1
        ]
        if wrong:
            raise PackedFileError(
                f"it is corrupt: {len(wrong)} of {len(found)} memories differ from their checksums"
            )
