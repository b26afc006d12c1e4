"""The folder of an incomplete model, from which an interrupted run goes on.

``.NAME.unfinished`` beside the target NAME holds ``manifest.json``, which says what is being made
of what; ``model``, which becomes the target by one renaming; and ``layers`` with what
calibration has found.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interposer.errors import StorageError
from interposer.tooling import write_text

_MANIFEST = "manifest.json"


class WorkFolder:
    """The folder for a target; ``resumed`` says that an earlier run left it."""

    def __init__(self, target: Path, resumed: bool) -> None:
        self.target = target
        self.root = _root(target)
        self.model = self.root / "model"
        self.layers = self.root / "layers"
        self.resumed = resumed

    @classmethod
    def open(cls, target: Path, settings: Mapping[str, Any], *, restart: bool) -> WorkFolder:
        """Return the folder of an interrupted run with the same settings, or a new one.

        Args:
            settings: JSON that everything in the folder follows from.
            restart: drop what an interrupted run has left.
        Raises: StorageError: the target exists; or what an interrupted run left is of other
            settings or not known; or folders cannot be made.
        """
        target = target.absolute()
        if target.exists() or target.is_symlink():
            raise StorageError(
                target, "exists already, and is left as it is", "remove it, or name another folder"
            )
        root = _root(target)
        found = _read_manifest(root)
        if found is not None and restart:
            _remove(root)
            found = None
        if found is not None:
            _check_settings(root, found, settings)
        folder = cls(target, resumed=found is not None)
        try:
            for part in (folder.model, folder.layers):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(root, f"cannot be made: {error.strerror or error}") from error
        if found is None:
            write_text(root / _MANIFEST, json.dumps(settings, indent=2, sort_keys=True))
        return folder

    def finish(self) -> None:
        """Let the target appear, and remove the rest.

        Raises: StorageError: the target cannot be made, because it exists by now for example.
        """
        try:
            for left in self.model.glob("*.part"):  # of a run that was killed
                left.unlink(missing_ok=True)
            if self.target.exists():
                raise StorageError(
                    self.target,
                    "was made by something else meanwhile",
                    "remove it, and run the same command again, which only has to rename",
                )
            self.model.rename(self.target)
        except OSError as error:
            raise StorageError(self.target, f"cannot be made: {error.strerror or error}") from error
        _remove(self.root)


def _root(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


def _read_manifest(root: Path) -> dict[str, Any] | None:
    """Return the settings of the run that left ``root``, or None if it is empty."""
    try:
        content = json.loads((root / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        # The manifest is written before anything that matters.
        if not root.exists() or not any(path.is_file() for path in root.rglob("*")):
            return None
        content = None
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise StorageError(root, "is not what an interrupted run has left", "remove it")
    return content


def _check_settings(root: Path, found: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    differing = [
        f"  {name}: {found.get(name)!r} then, {settings.get(name)!r} now"
        for name in sorted(found.keys() | settings.keys())
        if found.get(name) != settings.get(name)
    ]
    if differing:
        listed = "\n".join(differing)
        raise StorageError(
            root,
            f"was left by an interrupted run with other settings:\n{listed}",
            "the same settings, to go on from there; or --restart, to drop what it has done",
        )


def _remove(root: Path) -> None:
    try:
        shutil.rmtree(root)
    except OSError as error:
        raise StorageError(root, f"cannot be removed: {error.strerror or error}") from error
