"""The tensors of a model directory by name, read one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from interposer.errors import CheckpointError
from interposer_models._checkpoint.checkpoint import reading


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by the header of its file; ``dtype`` is the name that safetensors gives it."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]


class TensorSource:
    """Every tensor of some safetensors files.

    Raises: CheckpointError: a file is corrupt, or two of them hold a tensor of one name.
    """

    def __init__(self, shards: tuple[Path, ...]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        for shard in shards:
            with reading(shard), safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dictionary
                    if name in self.tensors:
                        raise CheckpointError(
                            shard,
                            f"holds the tensor {name!r}, and so does {self.tensors[name].shard}",
                        )
                    facts = file.get_slice(name)
                    shape = tuple(facts.get_shape())
                    self.tensors[name] = StoredTensor(shard, facts.get_dtype(), shape)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in memory of its own.

        Raises: CheckpointError: its file was changed meanwhile.
        """
        shard = self.tensors[name].shard
        with reading(shard), safe_open(shard, framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file.

    Raises: CheckpointError: the file is corrupt.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
