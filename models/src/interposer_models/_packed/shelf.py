"""The folders that packed weights lie in: beside the model, and in the user's cache."""

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
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._packed.packed_file import Facts, PackedFile, PackedFileError
from interposer_models._packed.packed_key import PackedKey, difference
from interposer_models._packed.packed_writer import PackedWriter

LEAST_BYTES = 64 << 20
"""Smaller checkpoints are read as fast as a packed file is found."""

_KIND = "packed"
_BESIDE = "interposer-packed"
_SUFFIX = ".safetensors"
_IDLE = 19  # the least urgent of threads
_log = logging.getLogger("interposer")


def folder_beside(path: Path) -> Path:
    """Return the folder for packed weights beside a model: in its folder, or next to its file.

    Others read all weights of a model's folder, so that they lie in one of their own.
    """
    return path / _BESIDE if path.is_dir() else path.with_name(f"{path.name}.{_BESIDE}")


@dataclass(frozen=True, slots=True)
class Shelf:
    """Packed weights of one key.

    Attributes:
        beside: the folder beside the model.
        kept: the folder in the cache.
        most_bytes: of all files in ``kept``.
        weight_check: the policy that a file must satisfy.
        store: the cache, whose secret signs the headers of files.
        refused: why files that were found are not used, as far as ``find`` has seen.
    """

    key: PackedKey
    beside: Path
    kept: Path
    most_bytes: int
    weight_check: str
    store: Store
    refused: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, key: PackedKey, checkpoint: Checkpoint | CheckpointFile, config: Config) -> Shelf:
        """Return the shelf of a checkpoint under a configuration."""
        store = default_store(config)
        kept, beside = store.folder / _KIND, folder_beside(checkpoint.path)
        return cls(key, beside, kept, config.packed_bytes, config.weight_check, store)

    def find(self) -> PackedFile | None:
        """Return the file that fits, None where there is none."""
        name = f"{self.key.address}{_SUFFIX}"
        for folder in (self.beside, self.kept):
            if (found := self._fitting(folder / name)) is not None:
                with suppress(OSError, NotImplementedError):  # the use, by which the cache forgets
                    os.utime(found.path, follow_symlinks=False)
                return found
        for path in files_in(self.beside):
            if path.name != name:
                self._fitting(path)
        return None

    def _fitting(self, path: Path) -> PackedFile | None:
        if not os.path.lexists(path):
            return None
        try:
            found = PackedFile.open(path)
            differs = difference(found.facts.asked, self.key.asked)
            differs = differs or difference(found.facts.made_by, self.key.made_by)
            differs = differs or unchecked(found.facts, self.weight_check)
            differs = differs or self._unsigned(found)
            if differs:
                raise PackedFileError(differs)
        except PackedFileError as error:
            self.refused.append(f"{path}: {error}")
            return None
        return found

    def _unsigned(self, file: PackedFile) -> str:
        """Return why a file is neither of this user's processes nor of root, else ""."""
        secret = self.store.secret()
        if file.is_of_root or (secret is not None and file.is_signed(secret)):
            return ""
        return (
            "it has no signature of this user's cache, so that it was made elsewhere or its header "
            "was changed"
        )

    def judge_room(self, num_bytes: int) -> str:
        """Return why a checkpoint of so many bytes is not kept in the cache, empty where it is."""
        if num_bytes > self.most_bytes:
            return f"it has {num_bytes} bytes, packed_bytes allows {self.most_bytes}"
        folder = self.kept
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < 2 * num_bytes:
            return f"the disk of {folder} has {free_bytes} bytes, twice {num_bytes} are wanted"
        return ""

    def writer(self, folder: Path) -> PackedWriter:
        """Return a new file in ``folder``.

        Raises: PackedFileError: it cannot be written.
        """
        return PackedWriter(folder / f"{self.key.address}{_SUFFIX}", self.store.secret())

    def publish_soon(self, writer: PackedWriter, facts: Facts) -> None:
        """Publish a file of the cache in a thread, which an ending process does not wait for."""

        def publish() -> None:
            with suppress(OSError, AttributeError):  # of this thread alone, on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE)
            try:
                writer.publish(facts)
                self.evict(writer.path)
            except PackedFileError as error:
                _log.warning("packed weights are not kept: %s", error)
            finally:
                writer.close()

        threading.Thread(target=publish, name="interposer-packed", daemon=True).start()

    def evict(self, newest: Path) -> None:
        """Remove the files of the cache that were not used for longest, beyond its bytes."""
        with suppress(OSError):
            facts = [(path.lstat(), path) for path in files_in(self.kept)]
            used = [(each.st_mtime_ns, each.st_size, path) for each, path in facts]
            total = sum(size for _, size, _ in used)
            for _, size, path in sorted(used):
                if total > self.most_bytes and path != newest:
                    path.unlink(missing_ok=True)  # who has mapped it keeps it
                    total -= size


def unchecked(facts: Facts, weight_check: str) -> str:
    """Return why a policy does not let packed weights be used without a check; else empty."""
    if weight_check == "off":
        return ""
    if facts.non_finite is None:
        return "it was packed with weight_check='off'"
    if facts.non_finite and weight_check == "refuse":
        return "it holds weights that are NaN or infinite"
    return ""


def files_in(folder: Path) -> list[Path]:
    """Return the packed files in a folder, by name."""
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)
    return []
