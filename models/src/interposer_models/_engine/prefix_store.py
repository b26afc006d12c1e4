"""Memory beside the cache for pages and states that it gave up, until a prompt wants them again."""

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

_LEAST_BYTES = 64


class StoredRows:
    """Rows of bytes by key, all of one size; the one that was used longest ago goes first.

    Attributes:
        on_evict: told the key of a row that another one takes.
    """

    def __init__(self, memory: Tensor, row_bytes: int) -> None:
        """Store nothing yet.

        Args:
            memory: bytes, of which as many rows are made as there are.
        """
        self.on_evict: Callable[[bytes], None] = _ignore
        self._memory = memory[: len(memory) // row_bytes * row_bytes].view(-1, row_bytes)
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._free = [*range(len(self._memory))]

    def __len__(self) -> int:
        """Return how many rows are in use."""
        return len(self._rows)

    def knows(self, key: bytes) -> bool:
        """Say whether there is a row of a key."""
        return key in self._rows

    def row(self, key: bytes) -> Tensor:
        """Return the bytes of a key."""
        self._rows.move_to_end(key)
        return self._memory[self._rows[key]]

    def new_row(self, key: bytes, kept: Set[bytes]) -> Tensor | None:
        """Return the bytes of a new key to write to; None where all rows are to be kept.

        Args:
            kept: keys whose rows are wanted just now.
        """
        if not self._free:
            oldest = next((each for each in self._rows if each not in kept), None)
            if oldest is None:
                return None
            self._free.append(self._rows.pop(oldest))
            self.on_evict(oldest)
        row = self._rows[key] = self._free.pop()
        return self._memory[row]

    def forget(self) -> None:
        """Store nothing any more."""
        self._free += self._rows.values()
        self._rows.clear()


class PrefixStore:
    """Pages and checkpoints that a model gave up, each kind in rows of its own."""

    def __init__(self, memory: Tensor, kinds: Sequence[tuple[int, int]], queued: bool) -> None:
        """Store nothing yet.

        Args:
            memory: bytes, which the kinds share as they share the cache.
            kinds: bytes of a row, and how many the cache has, of each kind.
            queued: the device reads and writes the memory itself.
        Raises: ConfigError: a kind has no room for one row.
        """
        self.queued = queued
        sizes = [(max(row_bytes, _LEAST_BYTES), count) for row_bytes, count in kinds]
        total = sum(row_bytes * count for row_bytes, count in sizes)
        self.kinds: list[StoredRows] = []
        start = 0
        for row_bytes, count in sizes:
            share = len(memory) * row_bytes * count // total // _LEAST_BYTES * _LEAST_BYTES
            if share < row_bytes:
                needed = max(-(-total // count) for _, count in sizes) + len(sizes) * _LEAST_BYTES
                raise ConfigError(
                    f"offload_bytes is {len(memory)}, which holds no page of each kind. "
                    f"Try: {needed} at least"
                )
            self.kinds.append(StoredRows(memory[start : start + share], row_bytes))
            start += share

    def put(self, kind: int, key: bytes, parts: Sequence[Tensor], kept: Set[bytes]) -> bool:
        """Store tensors by a key; say False where there is no room but that of ``kept``."""
        rows = self.kinds[kind]
        if rows.knows(key):
            rows.row(key)
        elif (row := rows.new_row(key, kept)) is not None:
            pack(parts, row, self.queued)
        else:
            return False
        return True

    def get(self, kind: int, key: bytes, parts: Sequence[Tensor]) -> None:
        """Write to tensors what was stored."""
        unpack(self.kinds[kind].row(key), parts, self.queued)

    def forget(self) -> None:
        """Store nothing any more."""
        for rows in self.kinds:
            rows.forget()


def file_memory(num_bytes: int, folder: Path) -> Tensor:
    """Return bytes of a file without a name in ``folder``, which goes with the tensor.

    Its room on the disk is taken at once, as a mapped file that finds none ends the process.

    Raises: ConfigError: there is no such folder, or no room in it.
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
    """Return bytes of the host, which the device reads and writes itself where it can."""
    memory = empty((num_bytes,), torch.uint8)
    return platform.pin_memory(memory) if platform.provides("pin_memory") else memory


def _reserve(file: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:  # macOS has none
        os.ftruncate(file, num_bytes)


def _ignore(key: bytes) -> None:
    """Let a row go."""
