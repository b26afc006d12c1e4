"""Safetensors files that are written and read tensor by tensor, in any order.

Source: the format is described at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import safe_open

from interposer.errors import CheckpointError, StorageError
from interposer_engine._checkpoint.files import reading

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
_ALIGNMENT = 8

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype's name and the shape of every tensor."""


def layout_bytes(layout: Layout) -> int:
    """Return the total size of the tensors in a layout, in bytes."""
    return sum(_num_bytes(*tensor) for tensor in layout.values())


class ShardFile:
    """A safetensors file that appears at ``path`` only once it is complete.

    Until then the content is in a file of the same folder with the ending ``.part``.

    Raises: StorageError: the file cannot be written, for example because the disk is full.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        # With the process id, so that another process with the same target does not write into it.
        self._part = path.with_name(f"{path.name}.{os.getpid()}.part")
        self._offsets: dict[str, tuple[int, int]] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Tensors with the widest elements come first, so that all are aligned.
        for name in sorted(layout, key=lambda name: (-_ITEM_BYTES[layout[name][0]], name)):
            dtype, shape = layout[name]
            start, end = end, end + _num_bytes(dtype, shape)
            self._offsets[name] = start, end
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._start = 8 + len(text)
        self._missing = set(layout)
        try:
            # Unbuffered: otherwise close() would try to write again after a failed write.
            self._file = self._part.open("wb", buffering=0)
        except OSError as error:
            raise self._storage_error(error) from error
        try:
            self._write(memoryview(len(text).to_bytes(8, "little") + text))
            # The final size; tensors are then written at any offset, in any order.
            self._file.truncate(self._start + end)
        except OSError as error:
            self._drop()
            raise self._storage_error(error) from error

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor to the position that the file's header states."""
        start, end = self._offsets[name]
        content = _little_endian(tensor)
        assert content.numel() == end - start, name
        self._missing.discard(name)
        if start == end:
            return
        # A view of the tensor's memory; torch has none without numpy.
        view = (ctypes.c_char * content.numel()).from_address(content.data_ptr())
        try:
            self._file.seek(self._start + start)
            self._write(memoryview(view).cast("B"))
        except OSError as error:
            raise self._storage_error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Move the file to ``path`` if there was no error, else delete the file."""
        try:
            if kind is None:
                assert not self._missing, self._missing
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._part.replace(self.path)
        except OSError as failure:
            raise self._storage_error(failure) from failure
        finally:
            self._drop()

    def _drop(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _write(self, content: memoryview) -> None:
        while content:
            content = content[self._file.write(content) :]

    def _storage_error(self, error: OSError) -> StorageError:
        return StorageError(
            self.path,
            f"cannot be written: {error.strerror or error}",
            "free disk space, or remove the cause; the same command then continues from there",
        )


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a safetensors file that appears at its path only once complete.

    Raises: StorageError: the file cannot be written.
    """
    layout = {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    with ShardFile(path, layout) as shard:
        for name, tensor in tensors.items():
            shard.write(name, tensor)


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _ITEM_BYTES[dtype] * math.prod(shape)


def _little_endian(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in little-endian order, as contiguous uint8."""
    octets = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    if sys.byteorder == "big" and tensor.itemsize > 1:
        octets = octets.view(-1, tensor.itemsize).flip(1).flatten()
    return octets


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's entry in the header of a safetensors file; ``dtype`` is safetensors' name."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]


class TensorSource:
    """All tensors of some safetensors files, readable by name.

    Args:
        renamed: maps a stored name to the model's name; None for a tensor that the model does not
            use, which keeps the stored name.
    Attributes:
        tensors: by the model's name.
        unused: names of the tensors that the model does not use.
    Raises: CheckpointError: a file is corrupt, or two files contain a tensor of the same name.
    """

    def __init__(
        self, shards: tuple[Path, ...], renamed: Callable[[str], str | None] = str
    ) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.unused: list[str] = []
        for shard in shards:
            with reading(shard), safe_open(shard, framework="pt") as file:
                for stored_name in file.keys():  # noqa: SIM118  # file is no dictionary
                    model_name = renamed(stored_name)
                    name = stored_name if model_name is None else model_name
                    if model_name is None:
                        self.unused.append(stored_name)
                    if name in self.tensors:
                        raise CheckpointError(
                            shard,
                            f"holds the tensor {name!r}, and so does {self.tensors[name].shard}",
                        )
                    header = file.get_slice(stored_name)
                    shape, dtype = tuple(header.get_shape()), header.get_dtype()
                    self.tensors[name] = StoredTensor(stored_name, shard, dtype, shape)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into new memory.

        Raises: CheckpointError: the file was changed meanwhile.
        """
        # Opened for each read, so that no mapping keeps pages of large checkpoints in memory.
        stored = self.tensors[name]
        with reading(stored.shard), safe_open(stored.shard, framework="pt") as file:
            return file.get_tensor(stored.name)  # type: ignore[no-any-return]


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file.

    Raises: CheckpointError: the file is corrupt.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
