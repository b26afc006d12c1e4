"""Packed weights in a file: safetensors, whose data begin where a huge page of the file does.

The header is of one size, so that memory can be packed before it is known what there will be. Each
tensor of the file is the memory of tensors of layers, which the metadata tell with a checksum.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from interposer.tooling import checksum

FORMAT = 1
"""Changes with what a file of ours means."""

HEADER_BYTES = 2 << 20
_MAGIC = "interposer"
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


def write_header(file: int, facts: Facts, num_bytes: int) -> None:
    """Write the header of an open file with so many bytes behind it.

    Raises: PackedFileError: there is too much to say.
    """
    value = {**facts.to_json(), "format": FORMAT}
    text = json.dumps(value, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {_MAGIC: text, "checksum": checksum(value)}}
    # Tensors of safetensors have no gaps between them.
    starts = [start for start, _ in facts.memories]
    order = sorted(range(len(starts)), key=starts.__getitem__)
    edges = [0, *(starts[number] for number in order[1:]), num_bytes]
    for number, begin, end in zip(order, edges, edges[1:], strict=False):
        offsets = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        header[str(number)] = offsets
    encoded = json.dumps(header, separators=(",", ":")).encode()
    room = HEADER_BYTES - _LENGTH_BYTES
    if len(encoded) > room:
        raise PackedFileError(f"its header takes {len(encoded)} bytes, more than {room}")
    os.pwrite(file, room.to_bytes(_LENGTH_BYTES, "little") + encoded.ljust(room), 0)


def _read_header(path: Path) -> None:
    """Have the header in memory, and nothing behind it, which a fault there would read as well."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(file.fileno(), HEADER_BYTES, 0)


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
    """A file whose header was read and found sound."""

    path: Path
    facts: Facts

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Return the file at ``path``.

        Raises: PackedFileError: it is cut off, corrupt, or of another format.
        """
        try:
            _read_header(path)
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            size = path.stat().st_size - HEADER_BYTES
            value = json.loads(metadata[_MAGIC])
            intact = checksum(value) == metadata["checksum"]
            version = value.pop("format")
            if version != FORMAT:
                raise PackedFileError(f"it has format {version!r}, this version reads {FORMAT}")
            facts = Facts(**value)
            ends = [start + num_bytes for start, num_bytes in facts.memories]
        except (SafetensorError, OSError) as error:
            raise PackedFileError(f"it is truncated or corrupt: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackedFileError(f"it holds no packed weights: {type(error).__name__}") from error
        if not intact or max(ends, default=0) > size:
            raise PackedFileError("it is corrupt: its header and the checksum of that differ")
        return cls(path, facts)

    def memory(self, ahead: bool = True) -> MappedMemory:
        """Return its memories, mapped, to be read ``ahead`` of their use or not.

        Raises: PackedFileError: it cannot be mapped.
        """
        try:
            with self.path.open("rb") as file:
                return MappedMemory(file.fileno(), self.facts.memories, ahead)
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
