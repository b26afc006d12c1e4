"""Offloaded pages and states of the prefix cache, in host memory or in a file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from interposer import Platform
from interposer.errors import ConfigError
from interposer_models._engine.cache_contents import pack, unpack
from interposer_ops.devices.host_memory import empty

_ALIGNED_BYTES = 64


class StoredRows:
    """Byte rows of one size, by key; the least recently used row is evicted first.

    Attributes:
        on_evict: Called with the key of an evicted row.
    """

    def __init__(self, memory: Tensor, row_bytes: int) -> None:
        """Divide ``memory``, a tensor of bytes, into as many empty rows as fit."""
        self.on_evict: Callable[[bytes], None] = _ignore
        self._memory = memory[: len(memory) // row_bytes * row_bytes].view(-1, row_bytes)
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._free = [*range(len(self._memory))]

    def __len__(self) -> int:
        """Return the number of rows in use."""
        return len(self._rows)

    def has_key(self, key: bytes) -> bool:
        """Return whether a row is stored under ``key``."""
        return key in self._rows

    def row(self, key: bytes) -> Tensor:
        """Return the bytes stored under ``key``, and mark the row as recently used."""
        self._rows.move_to_end(key)
        return self._memory[self._rows[key]]

    def new_row(self, key: bytes, protected: Set[bytes]) -> Tensor | None:
        """Return a row to write under a new key; None if all rows are protected.

        Args:
            protected: Keys that must not be evicted now.
        """
        if not self._free:
            oldest = next(
                (stored_key for stored_key in self._rows if stored_key not in protected), None
            )
            if oldest is None:
                return None
            self._free.append(self._rows.pop(oldest))
            self.on_evict(oldest)
        row = self._rows[key] = self._free.pop()
        return self._memory[row]

    def forget(self) -> None:
        """Empty all rows."""
        self._free += self._rows.values()
        self._rows.clear()


class PrefixStore:
    """Offloaded pages and state checkpoints, with separate rows for each kind."""

    def __init__(self, memory: Tensor, kinds: Sequence[tuple[int, int]], queued: bool) -> None:
        """Divide the memory among the kinds, in proportion to the sizes in the KV cache.

        Args:
            memory: Bytes to divide.
            kinds: Row size in bytes and number of rows in the KV cache, for each kind.
            queued: Whether the device itself copies to and from the memory, so that nothing waits.
        Raises: ConfigError: the share of a kind is smaller than one row.
        """
        self.queued = queued
        sizes = [(max(row_bytes, _ALIGNED_BYTES), count) for row_bytes, count in kinds]
        total = sum(row_bytes * count for row_bytes, count in sizes)
        self.kinds: list[StoredRows] = []
        start = 0
        for row_bytes, count in sizes:
            kind_bytes = len(memory) * row_bytes * count // total // _ALIGNED_BYTES * _ALIGNED_BYTES
            # The advice is a size with which each kind gets at least one row.
            if kind_bytes < row_bytes:
                needed = max(-(-total // count) for _, count in sizes) + len(sizes) * _ALIGNED_BYTES
                raise ConfigError(
                    f"offload_bytes is {len(memory)}, which holds no page of each kind. "
                    f"Try: {needed} at least"
                )
            self.kinds.append(StoredRows(memory[start : start + kind_bytes], row_bytes))
            start += kind_bytes

    def put(self, kind: int, key: bytes, parts: Sequence[Tensor], protected: Set[bytes]) -> bool:
        """Store tensors under ``key``; return False if only protected rows could be evicted."""
        rows = self.kinds[kind]
        if rows.has_key(key):
            rows.row(key)
        elif (row := rows.new_row(key, protected)) is not None:
            pack(parts, row, self.queued)
        else:
            return False
        return True

    def get(self, kind: int, key: bytes, parts: Sequence[Tensor]) -> None:
        """Copy the tensors stored under ``key`` into ``parts``."""
        unpack(self.kinds[kind].row(key), parts, self.queued)

    def forget(self) -> None:
        """Empty the store."""
        for rows in self.kinds:
            rows.forget()


def file_memory(num_bytes: int, folder: Path) -> Tensor:
    """Map an unnamed temporary file in ``folder`` as a tensor; the file is deleted with the tensor.

    The disk space is allocated at once, because a write to a mapped file on a full disk would end
    the process.

    Raises: ConfigError: the folder does not exist, or has too little space.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), num_bytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    except OSError as error:
        raise ConfigError(
            f"offload_dir {folder} cannot take {num_bytes} bytes: {error.strerror}. "
            "Try: a smaller offload_bytes, or another folder"
        ) from None


def host_memory(num_bytes: int, platform: Platform) -> Tensor:
    """Allocate host memory, pinned if the platform supports direct access by the device."""
    memory = empty((num_bytes,), torch.uint8)
    return platform.pin_memory(memory) if platform.provides("pin_memory") else memory


def _reserve(file: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:  # macOS has no posix_fallocate
        os.ftruncate(file, num_bytes)


def _ignore(key: bytes) -> None: ...
