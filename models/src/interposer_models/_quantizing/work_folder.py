"""The folder with the work of an incomplete quantization, from which the next run continues.

The folder is ``.NAME.unfinished`` next to the target NAME. ``manifest.json`` in it states the
source and the settings; ``model`` becomes the target by one rename; ``layers`` has the results of
calibration.
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
    """The work folder of a target; ``resumed`` says that an earlier run created the folder."""

    def __init__(self, target: Path, resumed: bool) -> None:
        self.target = target
        self.root = _root(target)
        self.model = self.root / "model"
        self.layers = self.root / "layers"
        self.resumed = resumed

    @classmethod
    def open(cls, target: Path, settings: Mapping[str, Any], *, restart: bool) -> WorkFolder:
        """Open the folder of an interrupted run with the same settings, or create a new one.

        Args:
            settings: as JSON; everything in the folder depends only on the settings.
            restart: delete the work of an interrupted run.
        Raises: StorageError: the target exists; the folder is of other settings or unknown; or
            folders cannot be created.
        """
        target = target.absolute()
        if target.exists() or target.is_symlink():
            raise StorageError(
                target, "exists already, and is left as it is", "remove it, or name another folder"
            )
        root = _root(target)
        manifest = _read_manifest(root)
        if manifest is not None and restart:
            _remove(root)
            manifest = None
        if manifest is not None:
            _check_settings(root, manifest, settings)
        folder = cls(target, resumed=manifest is not None)
        try:
            for part in (folder.model, folder.layers):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(root, f"cannot be made: {error.strerror or error}") from error
        if manifest is None:
            write_text(root / _MANIFEST, json.dumps(settings, indent=2, sort_keys=True))
        return folder

    def finish(self) -> None:
        """Rename the finished model to the target, and remove the work folder.

        Raises: StorageError: the target cannot be created, for example because it exists already.
        """
        try:
            for partial_file in self.model.glob("*.part"):  # left by a run that was killed
                partial_file.unlink(missing_ok=True)
            if self.target.exists():
                raise StorageError(
                    self.target,
                    "was made by something else meanwhile",
                    "remove it, and run the same command again, which only has to rename",
                )
            # Atomic: both folders have the same parent file system.
            self.model.rename(self.target)
        except OSError as error:
            raise StorageError(self.target, f"cannot be made: {error.strerror or error}") from error
        _remove(self.root)


def _root(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


def _read_manifest(root: Path) -> dict[str, Any] | None:
    """Return the settings of the run that created ``root``; None if the folder is empty.

    Raises: StorageError: the folder contains something else.
    """
    try:
        content = json.loads((root / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        # The manifest is the first file that is written, so a folder without files can be reused.
        if not root.exists() or not any(path.is_file() for path in root.rglob("*")):
            return None
        content = None
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise StorageError(root, "is not what an interrupted run has left", "remove it")
    return content


def _check_settings(root: Path, manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    differences = [
        f"  {name}: {manifest.get(name)!r} then, {settings.get(name)!r} now"
        for name in sorted(manifest.keys() | settings.keys())
        if manifest.get(name) != settings.get(name)
    ]
    if differences:
        listed = "\n".join(differences)
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
