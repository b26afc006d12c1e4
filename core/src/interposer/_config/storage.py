"""Storage shared by processes: JSON with a checksum, one file per entry, never pickle.

A file is written completely under a temporary name and then renamed, so a reader sees the old entry
or the new one, and writers need no lock. An entry is valid only if the bytes equal the output of
``Store`` for the same key and value, in a regular file of this user or root. Files that other users
leave in a shared folder are refused with an error that names the file, and links are never
followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from platformdirs import user_cache_dir

from interposer._config.config import Config, effective_config
from interposer._config.file_access import check_folders, open_owned, warn_if_shared
from interposer._contract.errors import StorageError, warn

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

_VERSION = 1
_SECRET, _SECRET_BYTES = "secret", 32
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_FILE = re.compile(r"[0-9a-f]{32}\.json")
_FILE_OR_TEMPORARY = re.compile(rf"{_FILE.pattern}|\.{_FILE.pattern}\.[0-9a-f]{{16}}")


class StorageWarning(UserWarning):
    """The usual cache folder is unusable, so verdicts and measurements go to another one."""


def canonical_json(value: object) -> str:
    """Return the canonical JSON of ``value``: sorted keys, no spaces, ASCII only.

    Raises: ValueError: the value is not JSON, or is nested too deep.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def checksum(value: object) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON of ``value``.

    Raises: ValueError: the value is not JSON.
    """
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically; a missing folder is created.

    Raises: StorageError: the file cannot be written; the old content is unchanged.
    """
    # Not tempfile: only the owner could read its files, and a cache may serve several users.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Without newline translation, because an entry must match its checksum byte by byte.
            with temporary.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise StorageError(path, f"cannot be written: {error}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored value; ``problem`` says why the value cannot be used, or is empty."""

    path: Path
    key: Mapping[str, JSON] = field(default_factory=dict)
    value: JSON = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """A persistent key-value cache in ``folder``, shared by threads and processes.

    The constructor touches no file; folders are created by the first write. A kind is a word such
    as ``"verdicts"``.
    """

    folder: Path

    def read(self, kind: str, key: Mapping[str, JSON]) -> JSON | None:
        """Return the stored value of ``key``, or None without one.

        Raises: StorageError: the entry is corrupt, of another format or not readable.
        """
        path = self._path(kind, key)
        entry = _read(path)
        if entry is not None and entry.problem:
            raise StorageError(path, entry.problem, "remove it; it is made anew when needed")
        return None if entry is None else entry.value

    def write(self, kind: str, key: Mapping[str, JSON], value: JSON) -> None:
        """Store ``value`` under ``key``, and replace an old value.

        Raises: StorageError: key or value is not JSON, or the file cannot be written.
        """
        path = self._path(kind, key)
        try:
            text = _entry_text(dict(key), value)
        except ValueError as error:
            raise StorageError(path, f"the value is not JSON: {error}") from error
        try:
            check_folders(path)
        except OSError as error:
            raise StorageError(path, f"cannot be written: {error}") from error
        write_text(path, text)
        warn_if_shared(path.parent)

    def entries(self, kind: str) -> Iterator[Entry]:
        """Yield every entry of a kind, in the order of the file names."""
        folder = self._folder(kind)
        try:
            entries: Iterator[Entry | None] = map(_read, _listed(folder, _FILE))
        except (OSError, ValueError) as error:
            entries = iter([Entry(folder, problem=f"cannot be read: {error}")])
        yield from filter(None, entries)  # None: another process has just removed it

    def kinds(self) -> list[str]:
        """Return the kinds of stored entries, even if all entries of a kind are unreadable."""
        try:
            folders = [path for path in _listed(self.folder, _KIND) if path.is_dir()]
        except (OSError, ValueError):
            return []
        return [folder.name for folder in folders if any(self.entries(folder.name))]

    def clear(self, kind: str | None = None) -> int:
        """Remove the entries of one kind or of all kinds; return the number of removed entries.

        Files that the store did not write are not touched.

        Raises: StorageError: an entry cannot be removed.
        """
        removed = 0
        for folder in map(self._folder, [kind] if kind is not None else self.kinds()):
            try:
                check_folders(folder / "entry")
                # Temporary files of killed writers are removed too, but not counted.
                for path in _listed(folder, _FILE_OR_TEMPORARY):
                    path.unlink(missing_ok=True)
                    removed += not path.name.startswith(".")
            except (OSError, ValueError) as error:
                raise StorageError(folder, f"cannot be cleared: {error}") from error
        return removed

    def secret(self) -> bytes | None:
        """Return random bytes that only this user can read, created at the first call.

        The secret signs files of the cache that are too large to be read completely at each use.

        Returns: None if the secret can be neither read nor created, as in a folder of another user.
        """
        path = self.folder / _SECRET
        with suppress(OSError):
            check_folders(path)
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            try:
                if not path.exists():
                    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    with os.fdopen(descriptor, "wb") as file:
                        file.write(secrets.token_bytes(_SECRET_BYTES))
                    # A link appears with the complete content, so no other process reads a partial
                    # secret.
                    with suppress(FileExistsError):  # another process created the secret meanwhile
                        os.link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        with suppress(OSError), os.fdopen(open_owned(path), "rb") as file:
            # One byte more detects a file that is too long.
            if len(secret := file.read(_SECRET_BYTES + 1)) == _SECRET_BYTES:
                return secret
        return None

    def _folder(self, kind: str) -> Path:
        if not _KIND.fullmatch(kind):
            raise ValueError(f"{kind!r} is no kind of entries: not of the form {_KIND.pattern}")
        return self.folder / kind

    def _path(self, kind: str, key: Mapping[str, JSON]) -> Path:
        folder = self._folder(kind)
        try:
            return folder / _file_name(dict(key))
        except ValueError as error:
            raise StorageError(folder, f"the key {key!r} is not JSON: {error}") from error


def default_store(config: Config | None = None) -> Store:
    """Return the store in ``Config.cache_dir``, or else in the user's cache directory.

    Without a home folder, the store is in the folder for temporary files, with one warning.
    """
    folder = (config or effective_config()).cache_dir
    try:
        return Store(Path(folder or user_cache_dir("interposer", appauthor=False)).expanduser())
    except RuntimeError as error:
        return Store(_folder_without_home(str(error)))


@cache
def _folder_without_home(problem: str) -> Path:
    """Return a private folder in the temporary directory, or an unusable path if none is safe."""
    # Without user ids, the owner of a folder cannot be checked, so no folder is trusted.
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = Path(os.devnull, "interposer")
    with suppress(OSError):
        candidate = Path(tempfile.gettempdir(), f"interposer-{user}")
        candidate.mkdir(mode=0o700, exist_ok=True)
        status = candidate.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if private and status.st_uid == user:
            folder = candidate
    message = f"{problem} The cache is now {folder}. Try: set INTERPOSER_CACHE_DIR"
    warn(message, StorageWarning)
    return folder


def _file_name(key: object) -> str:
    return f"{checksum(key)[:32]}.json"


def _entry_text(key: object, value: object) -> str:
    entry = {"version": _VERSION, "key": key, "value": value, "checksum": checksum([key, value])}
    return canonical_json(entry)


def _read(path: Path) -> Entry | None:
    """Return the entry in ``path``, usable or not, or None if the file does not exist."""
    try:
        with os.fdopen(open_owned(path), "rb") as file:
            text = file.read().decode("ascii")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return Entry(path, problem="is corrupt: not ASCII")
    except (OSError, ValueError) as error:
        return Entry(path, problem=f"cannot be read: {error}")
    try:
        fields: Any = json.loads(text)
        key, value = fields["key"], fields["value"]
        # Comparing the text covers the version, the checksum and the canonical form at once.
        intact = text == _entry_text(key, value)
        has_key = isinstance(key, dict) and path.name == _file_name(key)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return Entry(path, problem=f"is corrupt: {type(error).__name__}: {error}")
    if not intact:
        return Entry(path, problem="is corrupt: content and checksum differ")
    if not has_key:
        return Entry(path, problem="is the entry of another key")
    return Entry(path, key, value)


def _listed(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except FileNotFoundError:
        return []
