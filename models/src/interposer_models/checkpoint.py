"""Reading a Hugging Face model directory: config, index and tensors, in the order of the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from interposer.errors import CheckpointError

__all__ = ["Checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory whose config and list of shards were read and found complete.

    Attributes:
        shards: safetensors files in natural order.
        tensors: file by tensor name as the index promises; empty without an index.
    """

    path: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, str]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Return the checkpoint at ``path``.

        Raises: CheckpointError: no directory, no or a corrupt config.json, no weights, or an
            index that names a missing shard.
        """
        root = Path(path)
        if not root.is_dir():
            reason = "is not a directory" if root.exists() else "does not exist"
            mend = "give the folder of a downloaded model; nothing is downloaded"
            raise CheckpointError(root, reason, mend)
        config = read_json(root / "config.json")
        if not (root / _INDEX).exists():
            if not (root / _SINGLE).is_file():
                raise CheckpointError(root, f"holds neither {_SINGLE} nor {_INDEX}")
            return cls(root, config, (root / _SINGLE,), {})
        tensors = read_json(root / _INDEX).get("weight_map")
        if not isinstance(tensors, dict) or not tensors:
            raise CheckpointError(root / _INDEX, "has no 'weight_map'")
        if not all(isinstance(name, str) for name in tensors.values()):
            raise CheckpointError(root / _INDEX, "has a 'weight_map' that names no files")
        shards = []
        for name in sorted(set(tensors.values())):
            shard = root / name
            if shard.parent != root:
                raise CheckpointError(root / _INDEX, f"names {name!r}, outside the directory")
            if not shard.is_file():
                raise CheckpointError(
                    root / _INDEX, f"names the shard {name!r}, which is missing", "copy it again"
                )
            shards.append(shard)
        return cls(root, config, tuple(shards), tensors)

    @property
    def num_bytes(self) -> int:
        """Return the size of all shards in bytes."""
        return sum(shard.stat().st_size for shard in self.shards)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)`` shard by shard, in the order in which they lie in the file.

        Raises: CheckpointError: a shard is truncated or not safetensors, or lacks a tensor that
            the index promises.
        """
        seen: set[str] = set()
        for shard in self.shards:
            try:
                with safe_open(shard, framework="pt") as file:
                    for name in file.offset_keys():
                        seen.add(name)
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    shard, f"is truncated or not a safetensors file: {error}", "copy it again"
                ) from error
        for name, shard_name in self.tensors.items():
            if name not in seen:
                raise CheckpointError(
                    self.path / _INDEX,
                    f"names the tensor {name!r} in {shard_name!r}, which lacks it",
                )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; CheckpointError if it is missing or corrupt."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(path, "is missing", "copy it again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON: {error}", "copy it again") from error
    if not isinstance(content, dict):
        reason = f"holds {type(content).__name__}, expected an object"
        raise CheckpointError(path, reason, "copy it again")
    return content
