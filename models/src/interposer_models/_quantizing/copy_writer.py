"""Write the files of a quantized copy into the work folder, each one atomically."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

from interposer.errors import CheckpointError, StorageError
from interposer.tooling import write_text
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._quantizing.rounded_layers import Progress, RoundedLayers
from interposer_models._quantizing.shard_file import DTYPE_NAMES, ShardFile, layout_bytes
from interposer_models._quantizing.tensor_source import TensorSource
from interposer_models._quantizing.work_folder import WorkFolder

_INDEX = "model.safetensors.index.json"
# Formats of weights, which a quantized copy must not contain.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt")


class CopyWriter:
    """Writes one weights file per weights file of the source, then config and other files.

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
                layout.update({f"{layer}.{n}": t for n, t in rounded.layout(layer).items()})
            # Not quantized: the tensor is copied unchanged.
            elif stored.dtype in DTYPE_NAMES.values():
                layout[name] = stored.dtype, stored.shape
            else:
                raise CheckpointError(
                    stored.shard, f"tensor {name!r} is stored as {stored.dtype}, not supported"
                )

    def check_room(self, folder: WorkFolder, temporary_bytes: int = 0) -> None:
        """Raise StorageError if the disk is too small for the missing part of the copy.

        Args:
            temporary_bytes: of temporary files that exist until the copy is complete.
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
                "make room, or name a folder on another disk",
            )

    def write_weights(self, folder: WorkFolder, progress: Progress) -> None:
        """Write every weights file that is missing, tensor by tensor."""
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
        """Write the index and the config, and copy every other file without weights."""
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
        """Write a tensor of the source, or the quantized tensors of a layer."""
        layer = self._rounded.layer_of(name)
        if layer is None:
            file.write(name, self._source.read(name))
            return
        for part, tensor in self._rounded.tensors(layer).items():
            file.write(f"{layer}.{part}", tensor)
