"""Writer of a model's quantized copy, in a work folder that survives an interruption.

The work folder is ``.NAME.unfinished`` next to the target NAME, and the next run continues from it.
``manifest.json`` in it states the source and the settings; ``model`` becomes the target by one
rename; ``layers`` has the results of calibration.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interposer.errors import CheckpointError, StorageError
from interposer.tooling import write_text
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._quantize.files import DTYPE_NAMES, ShardFile, TensorSource, layout_bytes
from interposer_engine._quantize.rounding import Progress, RoundedLayers

_MANIFEST = "manifest.json"


class WorkFolder:
    """The work folder of a quantized copy; ``resumed`` says that an earlier run created it."""

    def __init__(self, target: Path, resumed: bool) -> None:
        self.target = target
        self.root = _root(target)
        self.model = self.root / "model"
        self.layers = self.root / "layers"
        self.resumed = resumed

    @classmethod
    def open(cls, target: Path, settings: Mapping[str, Any], *, restart: bool) -> WorkFolder:
        """Open the work folder of an interrupted run with the same settings, or create a new one.

        Args:
            settings: the settings as JSON; everything in the folder depends only on them.
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
            raise StorageError(root, f"cannot be created: {error.strerror or error}") from error
        if manifest is None:
            write_text(root / _MANIFEST, json.dumps(settings, indent=2, sort_keys=True))
        return folder

    def finish(self) -> None:
        """Rename the finished copy to the target folder, and remove the work folder.

        Raises: StorageError: the target cannot be created, for example because it exists already.
        """
        try:
            for partial_file in self.model.glob("*.part"):  # left by a run that was killed
                partial_file.unlink(missing_ok=True)
            if self.target.exists():
                raise StorageError(
                    self.target,
                    "was created by another program meanwhile",
                    "remove it, and run the same command again, which only has to rename",
                )
            # Atomic: both folders have the same parent file system.
            self.model.rename(self.target)
        except OSError as error:
            reason = f"cannot be created: {error.strerror or error}"
            raise StorageError(self.target, reason) from error
        _remove(self.root)


def _root(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


def _read_manifest(root: Path) -> dict[str, Any] | None:
    """Return the settings of the run that created the work folder; None if it is empty.

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
        raise StorageError(root, "was not created by an interrupted run", "remove it")
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


_INDEX = "model.safetensors.index.json"
# Formats of weights, which a quantized copy must not contain.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt")


class CopyWriter:
    """Writes a weights file for each weights file of the source, then config and other files.

    Raises: CheckpointError: a tensor has an unknown dtype.
    """

    def __init__(
        self, checkpoint: Checkpoint, source: TensorSource, rounded: RoundedLayers
    ) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._rounded = rounded
        self._layouts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
            shard.name: {} for shard in checkpoint.shards
        }
        for name, stored in source.tensors.items():
            layout = self._layouts[stored.shard.name]
            layer = rounded.layer_of(name)
            if layer is not None:
                stored_layer = stored.name.removesuffix(".weight")
                parts = rounded.layout(layer).items()
                layout.update({f"{stored_layer}.{part}": tensor for part, tensor in parts})
            # Not quantized: the tensor is copied unchanged.
            elif stored.dtype in DTYPE_NAMES.values():
                layout[stored.name] = stored.dtype, stored.shape
            else:
                raise CheckpointError(
                    stored.shard,
                    f"tensor {stored.name!r} is stored as {stored.dtype}, not supported",
                )

    def check_disk_space(self, folder: WorkFolder, temporary_bytes: int = 0) -> None:
        """Raise StorageError if the free disk space is too small for the missing files of the copy.

        Args:
            temporary_bytes: size of temporary files that exist until the copy is complete.
        """
        # An interrupted run may have written some files already.
        missing_files = [name for name in self._layouts if not (folder.model / name).exists()]
        needed_bytes = (
            sum(layout_bytes(self._layouts[name]) for name in missing_files) + temporary_bytes
        )
        free_bytes = shutil.disk_usage(folder.root).free
        if needed_bytes > free_bytes:
            raise StorageError(
                folder.target,
                f"needs {needed_bytes} bytes, the disk has {free_bytes} left",
                "free disk space, or name a folder on another disk",
            )

    def write_weights(self, folder: WorkFolder, progress: Progress) -> None:
        """Write every weights file that is still missing, tensor by tensor."""
        done_bytes, total_bytes = 0, self._checkpoint.num_bytes
        for shard in self._checkpoint.shards:
            progress("writing", done_bytes, total_bytes)
            target = folder.model / shard.name
            if not target.exists():
                names = [n for n, stored in self._source.tensors.items() if stored.shard == shard]
                with ShardFile(target, self._layouts[shard.name]) as file:
                    for count, name in enumerate(names):
                        self._write_tensor(file, name)
                        shard_bytes = shard.stat().st_size * (count + 1) // len(names)
                        progress("writing", done_bytes + shard_bytes, total_bytes)
            done_bytes += shard.stat().st_size
        progress("writing", done_bytes, total_bytes)

    def write_rest(self, folder: WorkFolder, quantization: Mapping[str, Any]) -> None:
        """Write the index and the config, and copy all other files except weights."""
        if self._checkpoint.tensors:
            shards = self._layouts.items()
            index = {
                "metadata": {"total_size": sum(map(layout_bytes, self._layouts.values()))},
                "weight_map": {name: shard for shard, layout in shards for name in layout},
            }
            write_text(folder.model / _INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        config = {**self._checkpoint.config, "quantization_config": dict(quantization)}
        write_text(folder.model / "config.json", json.dumps(config, indent=2) + "\n")
        for file in sorted(self._checkpoint.path.iterdir()):
            is_written = file.name == "config.json" or file.name.endswith(".index.json")
            if file.is_file() and not is_written and file.suffix not in _WEIGHTS:
                try:
                    shutil.copyfile(file, folder.model / file.name)
                except OSError as error:
                    raise StorageError(
                        folder.model / file.name, f"cannot be written: {error.strerror or error}"
                    ) from error

    def _write_tensor(self, file: ShardFile, name: str) -> None:
        """Write a tensor of the source model, or the quantized tensors that replace the weight."""
        layer, stored_name = self._rounded.layer_of(name), self._source.tensors[name].name
        if layer is None:
            file.write(stored_name, self._source.read(name))
            return
        stored_layer = stored_name.removesuffix(".weight")
        for part, tensor in self._rounded.tensors(layer).items():
            file.write(f"{stored_layer}.{part}", tensor)
