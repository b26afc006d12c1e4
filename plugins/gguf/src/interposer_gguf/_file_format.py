"""Reading the structure of GGUF files: metadata and the places of tensors, each bound checked.

Source: docs/gguf.md of ggml, the format's versions 2 and 3. The library ``gguf`` reads the same
structure, but trusts its counts, and needs 40 microseconds for each of a vocabulary's texts.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._microscaling import LAYOUTS

Metadata = dict[str, Any]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Codes of struct by the number of a type of metadata.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_PLAIN = {0: ("f32", torch.float32), 1: ("f16", torch.float16), 30: ("bf16", torch.bfloat16)}
_BLOCKS = {layout.number: layout for layout in LAYOUTS.values()}
# What stands in files, but is not read; only for the text of an error.
_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
# The fewest bytes that an entry can take: empty name, type, smallest value; and empty name, no
# dimensions, type, offset.
_LEAST_ENTRY, _LEAST_TENSOR = 13, 24
# Far above any model; together they bound what the structure of a file can take of memory.
_MOST_ELEMENTS = 1 << 22
_LONGEST_TEXT = 1 << 24
_MOST_METADATA = 1 << 28
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 16
_ALIGNMENT = 32
_AGAIN = "copy the file again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in its file.

    Attributes:
        stored_as: ``f32``, ``f16``, ``bf16`` or the name of a block format.
        shape: as torch has it: the dimension along which numbers follow each other is the last.
        start: of its first byte in the file.
    """

    name: str
    stored_as: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def in_blocks(self) -> bool:
        """Its rows are blocks, not floats."""
        return self.stored_as in LAYOUTS


class GGUFFile:
    """The structure of one file.

    Attributes:
        metadata: values by key; arrays are lists.
        tensors: by name, in the order of the file.
    """

    def __init__(self, path: Path, metadata: Metadata, tensors: dict[str, StoredTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Return the structure of the file at ``path``.

        Raises:
            CheckpointError: it cannot be read, is no GGUF file, or contradicts itself.
            UnsupportedModelError: a tensor is stored as something that is not read.
        """
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                return _Reader(path, file, size).read()
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error}") from error

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return a tensor: floats of its shape, or its rows of blocks ``[..., row]`` uint8.

        Raises: CheckpointError: the file became shorter since it was opened.
        """
        content = bytearray(tensor.num_bytes)
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.start)
                count = file.readinto(content)
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read: {error}") from error
        if count != tensor.num_bytes:
            raise CheckpointError(self.path, f"ends within the tensor {tensor.name!r}", _AGAIN)
        octets = torch.frombuffer(content, dtype=torch.uint8)
        if tensor.in_blocks:
            layout = LAYOUTS[tensor.stored_as]
            return octets.view(*tensor.shape[:-1], layout.row_bytes(tensor.shape[-1]))
        dtype = next(dtype for name, dtype in _PLAIN.values() if name == tensor.stored_as)
        if sys.byteorder == "big":
            octets = octets.view(-1, dtype.itemsize).flip(1).contiguous().flatten()
        return octets.view(dtype).view(tensor.shape)


class _Reader:
    """Reads a file from its beginning, never further than its size."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.place = 0
        self.num_elements = 0

    def read(self) -> GGUFFile:
        if self._bytes(4, "its first bytes") != _MAGIC:
            raise CheckpointError(self.path, "is not a GGUF file: it does not begin with 'GGUF'")
        version = self._number("I", "its version")
        if version not in _VERSIONS:
            raise CheckpointError(self.path, *_version_problem(version))
        num_tensors = self._number("Q", "its number of tensors")
        num_entries = self._number("Q", "its number of metadata entries")
        self._fits(num_entries, _LEAST_ENTRY, "metadata entries")
        metadata: Metadata = {}
        for _ in range(num_entries):
            key = self._text("a metadata key")
            if key in metadata:
                raise CheckpointError(self.path, f"holds the metadata {key!r} twice", _AGAIN)
            metadata[key] = self._value(self._number("I", f"the type of {key!r}"), key)
        self._fits(num_tensors, _LEAST_TENSOR, "tensors")
        tensors: dict[str, StoredTensor] = {}
        for _ in range(num_tensors):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise CheckpointError(self.path, f"holds the tensor {tensor.name!r} twice", _AGAIN)
            tensors[tensor.name] = tensor
        return GGUFFile(self.path, metadata, self._placed(tensors, self._alignment(metadata)))

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self.size - self.place:
            raise CheckpointError(
                self.path,
                f"ends within {what}: {count:,} bytes are needed at {self.place:,}, the file has "
                f"{self.size:,}",
                _AGAIN,
            )
        if self.place + count > _MOST_METADATA:
            raise CheckpointError(
                self.path, f"has more than {_MOST_METADATA >> 20} MiB of metadata, before {what}"
            )
        content = self.file.read(count)
        if len(content) != count:
            raise CheckpointError(self.path, f"ended while {what} was read", _AGAIN)
        self.place += count
        return content

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}"), what))[0]

    def _text(self, what: str) -> str:
        length = self._number("Q", f"the length of {what}")
        if length > _LONGEST_TEXT:
            raise CheckpointError(
                self.path, f"says that {what} has {length:,} bytes, at most {_LONGEST_TEXT:,} are"
                " read",
            )  # fmt: skip
        content = self._bytes(length, what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(self.path, f"holds {what} that is not UTF-8: {error}") from error

    def _fits(self, count: int, least: int, what: str) -> None:
        left = self.size - self.place
        if count * least > left:
            raise CheckpointError(
                self.path,
                f"says that it holds {count:,} {what}, for which the {left:,} bytes that follow "
                "are too few",
                _AGAIN,
            )

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(f"the metadata {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        return self._number(self._code(kind, key), f"the metadata {key!r}")

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(
                self.path, f"holds the metadata {key!r} of the type {kind}, which is not known"
            )
        return _SCALARS[kind]

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I", f"the type of {key!r}")
        count = self._number("Q", f"the number of elements of {key!r}")
        code = "Q" if kind == _STRING else self._code(kind, key)
        self._fits(count, struct.calcsize(f"<{code}"), f"elements of {key!r}")
        self.num_elements += count
        if self.num_elements > _MOST_ELEMENTS:
            raise CheckpointError(
                self.path, f"holds more than {_MOST_ELEMENTS:,} elements of metadata, with {key!r}"
            )
        if kind == _STRING:
            what = f"an element of {key!r}"
            return [self._text(what) for _ in range(count)]
        content = self._bytes(count * struct.calcsize(f"<{code}"), f"the metadata {key!r}")
        return list(struct.unpack(f"<{count}{code}", content))

    def _tensor(self) -> StoredTensor:
        """Return a tensor whose start is counted from where tensors begin."""
        name = self._text("the name of a tensor")
        what = f"the description of the tensor {name!r}"
        num_dims = self._number("I", what)
        if not 1 <= num_dims <= _MOST_DIMENSIONS:
            raise CheckpointError(
                self.path,
                f"holds the tensor {name!r} of {num_dims} dimensions, must be 1 to "
                f"{_MOST_DIMENSIONS}",
            )
        shape = tuple(self._number("Q", what) for _ in range(num_dims))[::-1]
        kind = self._number("I", what)
        start = self._number("Q", what)
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            raise CheckpointError(self.path, f"holds the tensor {name!r} of the shape {shape}")
        if kind in _PLAIN:
            stored_as, dtype = _PLAIN[kind]
            return StoredTensor(name, stored_as, shape, start, count * dtype.itemsize)
        if kind not in _BLOCKS:
            raise UnsupportedModelError(self.path, _type_problem(name, kind))
        layout = _BLOCKS[kind]
        if shape[-1] % layout.size:
            raise CheckpointError(
                self.path,
                f"holds the tensor {name!r} in blocks of {layout.size}, which do not divide its "
                f"rows of {shape[-1]}",
            )
        return StoredTensor(name, layout.name, shape, start, layout.row_bytes(count))

    def _alignment(self, metadata: Metadata) -> int:
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if (
            type(alignment) is not int
            or not 0 < alignment <= _MOST_ALIGNMENT
            or (alignment & alignment - 1)
        ):
            raise CheckpointError(
                self.path, f"has the alignment {alignment!r:.50}, must be a power of two"
            )
        return alignment

    def _placed(self, tensors: dict[str, StoredTensor], alignment: int) -> dict[str, StoredTensor]:
        """Return the tensors with their places in the file, none of which overlap."""
        base = -(-self.place // alignment) * alignment
        for tensor in tensors.values():
            if tensor.start % alignment:
                raise CheckpointError(
                    self.path,
                    f"places the tensor {tensor.name!r} at {tensor.start:,}, which is no multiple "
                    f"of {alignment}",
                )
            end = base + tensor.start + tensor.num_bytes
            if end > self.size:
                raise CheckpointError(
                    self.path,
                    f"ends within the tensor {tensor.name!r}, which goes on to {end:,}; the file "
                    f"has {self.size:,} bytes",
                    _AGAIN,
                )
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for one, other in pairwise(ordered):
            if one.start + one.num_bytes > other.start:
                raise CheckpointError(
                    self.path, f"lays the tensors {one.name!r} and {other.name!r} over each other"
                )
        return {
            t.name: StoredTensor(t.name, t.stored_as, t.shape, base + t.start, t.num_bytes)
            for t in ordered
        }


def _version_problem(version: int) -> tuple[str, str]:
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in _VERSIONS:
        return "is big-endian, which is not read", "convert the model to a little-endian file"
    return f"is of version {version}, read are {_VERSIONS}", "convert the model again"


def _type_problem(name: str, kind: int) -> str:
    known = ", ".join(
        [plain.upper() for plain, _ in _PLAIN.values()] + [name.upper() for name in LAYOUTS]
    )
    called = (
        f"{_OTHERS[kind]}, which is not read" if kind in _OTHERS else f"the unknown type {kind}"
    )
    return f"stores the tensor {name!r} as {called}; read are {known}"
