"""Read the tensors of a model directory by name, one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from interposer.errors import CheckpointError
from interposer_models._checkpoint.checkpoint import reading


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's entry in the header of a file; ``dtype`` is the name in safetensors."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]


class TensorSource:
    """All tensors of some safetensors files, by name.

    Raises: CheckpointError: a file is corrupt, or two files contain a tensor of the same name.
    """

    def __init__(self, shards: tuple[Path, ...]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        for shard in shards:
            with reading(shard), safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # file is no dictionary
                    if name in self.tensors:
                        raise CheckpointError(
                            shard,
                            f"holds the tensor {name!r}, and so does {self.tensors[name].shard}",
                        )
                    header = file.get_slice(name)
                    shape = tuple(header.get_shape())
                    self.tensors[name] = StoredTensor(shard, header.get_dtype(), shape)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into new memory.

        Raises: CheckpointError: the file was changed meanwhile.
        """
        # Opened for each read, so that no mapping keeps pages of large checkpoints in memory.
        shard = self.tensors[name].shard
        with reading(shard), safe_open(shard, framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file.

    Raises: CheckpointError: the file is corrupt.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
