"""Stores of packed weights: a folder next to the model, and one in the user's cache."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from interposer import CheckpointFile, Config
from interposer.tooling import Store, default_store
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._packed.file import (
    Facts,
    PackedFile,
    PackedFileError,
    PackedKey,
    PackedWriter,
    difference,
)

MIN_BYTES = 64 << 20
"""Reading a smaller checkpoint is as fast as finding and mapping a packed file."""

_KIND = "packed"
_FOLDER = "interposer-packed"
_SUFFIX = ".safetensors"
_LOWEST_PRIORITY = 19  # a nice value
_log = logging.getLogger("interposer")


def folder_next_to(path: Path) -> Path:
    """Return the folder for packed weights, in the model's folder or next to the model's file.

    Other programs read all weight files of a model's folder, so that packed files need a subfolder.
    """
    return path / _FOLDER if path.is_dir() else path.with_name(f"{path.name}.{_FOLDER}")


@dataclass(frozen=True, slots=True)
class PackedStore:
    """The files of packed weights with one key, next to the model or in the user's cache.

    Attributes:
        key: identifies the weights and the versions of packages.
        model_folder: the folder next to the model.
        cache_folder: the folder in the cache.
        max_cache_bytes: limit for all files in ``cache_folder``.
        weight_check: the policy that a file must satisfy.
        cache: the cache, with the secret that signs headers of files.
        refusals: why files that ``find`` has seen cannot be used.
    """

    key: PackedKey
    model_folder: Path
    cache_folder: Path
    max_cache_bytes: int
    weight_check: str
    cache: Store
    refusals: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, key: PackedKey, checkpoint: Checkpoint | CheckpointFile, config: Config
    ) -> PackedStore:
        """Return the store of packed weights for a checkpoint under a configuration."""
        cache = default_store(config)
        cache_folder, model_folder = cache.folder / _KIND, folder_next_to(checkpoint.path)
        return cls(key, model_folder, cache_folder, config.packed_bytes, config.weight_check, cache)

    def find(self) -> PackedFile | None:
        """Return a packed file that matches the key, or None."""
        name = f"{self.key.address}{_SUFFIX}"
        for folder in (self.model_folder, self.cache_folder):
            if (file := self._matching_file(folder / name)) is not None:
                # Record the time of use, by which ``evict`` selects files.
                with suppress(OSError, NotImplementedError):
                    os.utime(file.path, follow_symlinks=False)
                return file
        # Other files next to the model cannot match, but their refusals explain the reason.
        for path in files_in(self.model_folder):
            if path.name != name:
                self._matching_file(path)
        return None

    def _matching_file(self, path: Path) -> PackedFile | None:
        if not os.path.lexists(path):
            return None
        try:
            file = PackedFile.open(path)
            fault = (
                difference(file.facts.asked, self.key.requested)
                or difference(file.facts.made_by, self.key.made_by)
                or check_fault(file.facts, self.weight_check)
                or self._signature_fault(file)
            )
            if fault:
                raise PackedFileError(fault)
        except PackedFileError as error:
            self.refusals.append(f"{path}: {error}")
            return None
        return file

    def _signature_fault(self, file: PackedFile) -> str:
        """Return why a packed file is not trusted (neither this user nor root wrote it), or ""."""
        secret = self.cache.secret()
        if file.is_of_root or (secret is not None and file.is_signed(secret)):
            return ""
        return (
            "it lacks the signature of this user's cache: another user wrote the file, or its "
            "header was changed"
        )

    def judge_space(self, num_bytes: int) -> str:
        """Return why a checkpoint of ``num_bytes`` does not fit into the user's cache, or ""."""
        if num_bytes > self.max_cache_bytes:
            return f"it has {num_bytes} bytes, packed_bytes allows {self.max_cache_bytes}"
        # disk_usage needs an existing folder; the cache may not exist yet.
        folder = self.cache_folder
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < 2 * num_bytes:
            return f"the disk of {folder} has {free_bytes} bytes, packing needs twice {num_bytes}"
        return ""

    def writer(self, folder: Path) -> PackedWriter:
        """Return a writer for a new packed file in ``folder``.

        Raises: PackedFileError: the file cannot be written.
        """
        return PackedWriter(folder / f"{self.key.address}{_SUFFIX}", self.cache.secret())

    def publish_soon(self, writer: PackedWriter, facts: Facts) -> None:
        """Publish a packed file in the cache by a thread that never delays the process's end."""

        def publish() -> None:
            with suppress(OSError, AttributeError):  # Linux sets the priority of one thread
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            try:
                writer.publish(facts)
                self.evict(writer.path)
            except PackedFileError as error:
                _log.warning("packed weights are not kept: %s", error)
            finally:
                writer.close()

        threading.Thread(target=publish, name="interposer-packed", daemon=True).start()

    def evict(self, newest: Path) -> None:
        """Remove the least recently used packed files until the cache is within its limit."""
        with suppress(OSError):
            stats = [(path.lstat(), path) for path in files_in(self.cache_folder)]
            files = [(stat.st_mtime_ns, stat.st_size, path) for stat, path in stats]
            total_bytes = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total_bytes > self.max_cache_bytes and path != newest:
                    path.unlink(missing_ok=True)  # processes that mapped the file keep its content
                    total_bytes -= size


def check_fault(facts: Facts, weight_check: str) -> str:
    """Return why the policy rejects packed weights, by the findings at packing time, or ""."""
    if weight_check == "off":
        return ""
    if facts.non_finite is None:
        return "it was packed with weight_check='off'"
    if facts.non_finite and weight_check == "refuse":
        return "it holds weights that are NaN or infinite"
    return ""


def files_in(folder: Path) -> list[Path]:
    """Return the packed files in a folder, sorted by name."""
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)
    return []
