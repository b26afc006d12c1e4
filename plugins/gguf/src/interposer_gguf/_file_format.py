"""Reader for the structure of GGUF files: metadata and tensor offsets, with every bound checked.

Source: docs/gguf.md of ggml, the format's versions 2 and 3. The library ``gguf`` reads the same
structure, but trusts the counts in a file, and takes 40 microseconds per token text.
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
# Format characters of the module struct, by GGUF's number of a metadata type.
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
# Unsupported types of ggml, for error texts only.
_UNSUPPORTED = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
# The smallest metadata entry: empty name, type, one byte. The smallest tensor entry: empty name, no
# dimensions, type, offset. A corrupt count is detected before memory is reserved for the entries.
_MIN_ENTRY_BYTES, _MIN_TENSOR_BYTES = 13, 24
# Far above any model. Together, these limits bound the memory that a malicious file can take.
_MAX_ELEMENTS = 1 << 22
_MAX_TEXT_BYTES = 1 << 24
_MAX_METADATA_BYTES = 1 << 28
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16
_ALIGNMENT = 32
_COPY_AGAIN = "copy the file again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Name, type, shape and location of a tensor in a file.

    Attributes:
        stored_as: ``f32``, ``f16``, ``bf16`` or the name of a block format.
        shape: in torch's order: elements along the last dimension are adjacent in memory.
        start: offset of the first byte in the file.
    """

    name: str
    stored_as: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def in_blocks(self) -> bool:
        """Whether the rows are quantized blocks, not floats."""
        return self.stored_as in LAYOUTS


class GGUFFile:
    """The structure of one GGUF file.

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
        """Read the structure of the file at ``path``.

        Raises:
            CheckpointError: the file cannot be read, is no GGUF file, or contradicts itself.
            UnsupportedModelError: a tensor has a type that is not supported.
        """
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                return _Reader(path, file, size).read()
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error}") from error

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Read a tensor: floats ``[...]``, or rows of blocks ``[..., row]`` uint8.

        Raises: CheckpointError: the file was truncated after opening.
        """
        content = bytearray(tensor.num_bytes)
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.start)
                count = file.readinto(content)
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read: {error}") from error
        if count != tensor.num_bytes:
            raise CheckpointError(self.path, f"ends within the tensor {tensor.name!r}", _COPY_AGAIN)
        octets = torch.frombuffer(content, dtype=torch.uint8)
        if tensor.in_blocks:
            layout = LAYOUTS[tensor.stored_as]
            return octets.view(*tensor.shape[:-1], layout.row_bytes(tensor.shape[-1]))
        dtype = next(dtype for name, dtype in _PLAIN.values() if name == tensor.stored_as)
        # Numbers in the file are little-endian.
        if sys.byteorder == "big":
            octets = octets.view(-1, dtype.itemsize).flip(1).contiguous().flatten()
        return octets.view(dtype).view(tensor.shape)


class _Reader:
    """Reads the structure of a file front to back, checking each read against the file size."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.position = 0
        self.num_elements = 0

    def read(self) -> GGUFFile:
        if self._bytes(4, "its first bytes") != _MAGIC:
            raise CheckpointError(self.path, "is not a GGUF file: it does not begin with 'GGUF'")
        version = self._number("I", "its version")
        if version not in _VERSIONS:
            raise CheckpointError(self.path, *_version_problem(version))
        num_tensors = self._number("Q", "its number of tensors")
        num_entries = self._number("Q", "its number of metadata entries")
        self._check_count(num_entries, _MIN_ENTRY_BYTES, "metadata entries")
        metadata: Metadata = {}
        for _ in range(num_entries):
            key = self._text("a metadata key")
            if key in metadata:
                raise CheckpointError(self.path, f"holds the metadata {key!r} twice", _COPY_AGAIN)
            metadata[key] = self._value(self._number("I", f"the type of {key!r}"), key)
        self._check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        tensors: dict[str, StoredTensor] = {}
        for _ in range(num_tensors):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise CheckpointError(
                    self.path, f"holds the tensor {tensor.name!r} twice", _COPY_AGAIN
                )
            tensors[tensor.name] = tensor
        return GGUFFile(self.path, metadata, self._with_offsets(tensors, self._alignment(metadata)))

    def _bytes(self, count: int, part: str) -> bytes:
        if count > self.size - self.position:
            raise CheckpointError(
                self.path,
                f"ends within {part}: {count:,} bytes are needed at {self.position:,}, the file "
                f"has {self.size:,}",
                _COPY_AGAIN,
            )
        if self.position + count > _MAX_METADATA_BYTES:
            raise CheckpointError(
                self.path,
                f"has more than {_MAX_METADATA_BYTES >> 20} MiB of metadata, before {part}",
            )
        content = self.file.read(count)
        if len(content) != count:
            raise CheckpointError(self.path, f"ended while {part} was read", _COPY_AGAIN)
        self.position += count
        return content

    def _number(self, code: str, part: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}"), part))[0]

    def _text(self, part: str) -> str:
        length = self._number("Q", f"the length of {part}")
        if length > _MAX_TEXT_BYTES:
            raise CheckpointError(
                self.path, f"says that {part} has {length:,} bytes, at most {_MAX_TEXT_BYTES:,} are"
                " read",
            )  # fmt: skip
        content = self._bytes(length, part)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(self.path, f"holds {part} that is not UTF-8: {error}") from error

    def _check_count(self, count: int, min_bytes: int, part: str) -> None:
        remaining_bytes = self.size - self.position
        if count * min_bytes > remaining_bytes:
            raise CheckpointError(
                self.path,
                f"says that it holds {count:,} {part}, for which the {remaining_bytes:,} bytes "
                "that follow are too few",
                _COPY_AGAIN,
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
        # A text takes at least the 8 bytes of its length.
        code = "Q" if kind == _STRING else self._code(kind, key)
        self._check_count(count, struct.calcsize(f"<{code}"), f"elements of {key!r}")
        self.num_elements += count
        if self.num_elements > _MAX_ELEMENTS:
            raise CheckpointError(
                self.path, f"holds more than {_MAX_ELEMENTS:,} elements of metadata, with {key!r}"
            )
        if kind == _STRING:
            part = f"an element of {key!r}"
            return [self._text(part) for _ in range(count)]
        content = self._bytes(count * struct.calcsize(f"<{code}"), f"the metadata {key!r}")
        return list(struct.unpack(f"<{count}{code}", content))

    def _tensor(self) -> StoredTensor:
        """Read the description of a tensor, with ``start`` relative to the start of the data."""
        name = self._text("the name of a tensor")
        part = f"the description of the tensor {name!r}"
        num_dims = self._number("I", part)
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            raise CheckpointError(
                self.path,
                f"holds the tensor {name!r} of {num_dims} dimensions, must be 1 to "
                f"{_MAX_DIMENSIONS}",
            )
        # GGUF states the dimension with adjacent elements first, torch states it last.
        shape = tuple(self._number("Q", part) for _ in range(num_dims))[::-1]
        kind = self._number("I", part)
        start = self._number("Q", part)
        # Python's integers do not overflow, so a huge shape is detected by the file size.
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
            or not 0 < alignment <= _MAX_ALIGNMENT
            or (alignment & alignment - 1)
        ):
            raise CheckpointError(
                self.path, f"has the alignment {alignment!r:.50}, must be a power of two"
            )
        return alignment

    def _with_offsets(
        self, tensors: dict[str, StoredTensor], alignment: int
    ) -> dict[str, StoredTensor]:
        """Return the tensors with absolute offsets, after checking that no two tensors overlap."""
        # Tensor data begins at the next multiple of the alignment after the descriptions.
        base = -(-self.position // alignment) * alignment
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
                    _COPY_AGAIN,
                )
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for first, second in pairwise(ordered):
            if first.start + first.num_bytes > second.start:
                raise CheckpointError(
                    self.path,
                    f"has the overlapping tensors {first.name!r} and {second.name!r}",
                )
        return {
            t.name: StoredTensor(t.name, t.stored_as, t.shape, base + t.start, t.num_bytes)
            for t in ordered
        }


def _version_problem(version: int) -> tuple[str, str]:
    # The version of a big-endian file, read as little-endian, has its bytes reversed.
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in _VERSIONS:
        return "is big-endian, which is not supported", "convert the model to a little-endian file"
    return f"is of version {version}, supported are {_VERSIONS}", "convert the model again"


def _type_problem(name: str, kind: int) -> str:
    supported = ", ".join(
        [float_name.upper() for float_name, _ in _PLAIN.values()]
        + [name.upper() for name in LAYOUTS]
    )
    type_text = (
        f"{_UNSUPPORTED[kind]}, which is not supported"
        if kind in _UNSUPPORTED
        else f"the unknown type {kind}"
    )
    return f"stores the tensor {name!r} as {type_text}; supported are {supported}"
