"""Tensors of a file, and what a Hugging Face checkpoint has in place of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from interposer.errors import CheckpointError
from interposer_gguf._architecture import Join
from interposer_gguf._block_formats import FORMATS
from interposer_gguf._file_format import GGUFFile, StoredTensor
from interposer_gguf._microscaling import LAYOUTS, MXFP4, unpacked
from interposer_gguf._restoration import Divided

Named = Iterator[tuple[str, torch.Tensor]]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Entry(ABC):
    """One tensor of a file, or several that become one, under names of checkpoints.

    Attributes:
        name: of a checkpoint's tensor; a layer that stays in blocks has the name of their format
            in place of ``weight`` then.
    """

    file: GGUFFile
    stored: StoredTensor
    name: str

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of what ``tensors`` yields."""

    @property
    def held(self) -> Mapping[str, str]:
        """The layers that stay in blocks, with the name of their format."""
        return {}

    @property
    def num_bytes(self) -> int:
        """The bytes of what ``tensors`` yields."""
        return size_of(self.stored, floats=not self.held)

    @abstractmethod
    def tensors(self) -> Named:
        """Yield names and tensors.

        Raises: CheckpointError: the file became shorter, or tensors are not what they must be.
        """

    def changed(self, change: Callable[..., Any], *values: Any) -> Any:
        """Return what a function makes of tensors, whose sizes may not be those that it needs.

        Raises: CheckpointError: they are not.
        """
        try:
            return change(*values)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(
                self.file.path,
                f"stores {self.stored.name!r} with the shape {self.stored.shape}, which the "
                "metadata contradicts",
            ) from error


@dataclass(frozen=True)
class Whole(Entry):
    """A tensor that is one of a checkpoint.

    Attributes:
        in_blocks: it stays in blocks.
        change: of its numbers, or of its bytes if it stays in blocks.
    """

    in_blocks: bool
    change: Change

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (_parameter(self.name, self.stored if self.in_blocks else None),)

    @property
    def held(self) -> Mapping[str, str]:
        """The layer, if it stays in blocks."""
        return {_layer(self.name): self.stored.stored_as} if self.in_blocks else {}

    def tensors(self) -> Named:
        """Yield the tensor."""
        values = self.file.read(self.stored)
        if not self.in_blocks:
            values = floats(self.stored, values)
        yield self.names[0], self.changed(self.change, values)


@dataclass(frozen=True)
class PerExpert(Entry):
    """The matrices ``[E, outputs, inputs]`` of all experts, each a tensor of a checkpoint."""

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each expert."""
        name = _parameter(self.name, self.stored if self._in_blocks else None)
        return tuple(name.format(expert) for expert in range(self.stored.shape[0]))

    @property
    def held(self) -> Mapping[str, str]:
        """The layer of each expert, if they stay in blocks."""
        return {_layer(name): self.stored.stored_as for name in self.names if self._in_blocks}

    def tensors(self) -> Named:
        """Yield the matrices one by one."""
        for name, matrix in zip(self.names, self.file.read(self.stored), strict=True):
            yield name, matrix if self._in_blocks else floats(self.stored, matrix)

    @property
    def _in_blocks(self) -> bool:
        return self.stored.stored_as in FORMATS


@dataclass(frozen=True)
class Joined(Entry):
    """Two tensors that are one of a checkpoint, and what makes it of their numbers."""

    second: StoredTensor
    join: Join

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    @property
    def num_bytes(self) -> int:
        """The bytes of both."""
        return size_of(self.stored, floats=True) + size_of(self.second, floats=True)

    def tensors(self) -> Named:
        """Yield what the two make."""
        both = (floats(part, self.file.read(part)) for part in (self.stored, self.second))
        yield self.name, self.changed(self.join, *both)


@dataclass(frozen=True)
class Apart(Entry):
    """A tensor whose rows are several of a checkpoint.

    Attributes:
        name: what stands before the names of the modules.
    """

    config: Mapping[str, Any]
    divided: Divided

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each of them."""
        stored = self.stored if self._in_blocks else None
        return tuple(_parameter(f"{self.name}{name}.weight", stored) for name in self.divided.names)

    @property
    def held(self) -> Mapping[str, str]:
        """All of them, if they stay in blocks."""
        return {_layer(name): self.stored.stored_as for name in self.names if self._in_blocks}

    def tensors(self) -> Named:
        """Yield the parts."""
        values = self.file.read(self.stored)
        if not self._in_blocks:
            values = floats(self.stored, values)
        parts = self.changed(self.divided.function, values, self.config)
        yield from zip(self.names, parts, strict=True)

    @property
    def _in_blocks(self) -> bool:
        return self.stored.stored_as in FORMATS


@dataclass(frozen=True)
class Microscaled(Entry):
    """Matrices of all experts in MXFP4, of which checkpoints have blocks and scales.

    Attributes:
        name: what ``_blocks`` and ``_scales`` follow.
        second: with whose rows those of ``stored`` alternate, if any.
    """

    second: StoredTensor | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of blocks and scales."""
        return f"{self.name}_blocks", f"{self.name}_scales"

    @property
    def held(self) -> Mapping[str, str]:
        """The experts."""
        return {_layer(self.name): MXFP4.name}

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors of the file."""
        return self.stored.num_bytes + (self.second.num_bytes if self.second else 0)

    def tensors(self) -> Named:
        """Yield blocks and scales."""
        rows = self.file.read(self.stored)
        if self.second is not None:
            rows = self.changed(in_turn, rows, self.file.read(self.second))
        yield from zip(self.names, unpacked(rows), strict=True)


def in_turn(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return rows ``[E, 2 O, ...]``, in turn one of each of two tensors ``[E, O, ...]``."""
    return torch.stack((first, second), 2).flatten(1, 2)


def floats(stored: StoredTensor, values: torch.Tensor) -> torch.Tensor:
    """Return numbers, of blocks those that they stand for."""
    if not stored.in_blocks:
        return values
    return LAYOUTS[stored.stored_as].dequantized(values, torch.float32)


def size_of(stored: StoredTensor, floats: bool) -> int:
    """Return the bytes of a tensor, whose blocks may become floats."""
    if not (floats and stored.in_blocks):
        return stored.num_bytes
    layout = LAYOUTS[stored.stored_as]
    return layout.row_numbers(stored.num_bytes) * torch.float32.itemsize


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _parameter(name: str, in_blocks: StoredTensor | None) -> str:
    return name if in_blocks is None else f"{name.removesuffix('.weight')}.{in_blocks.stored_as}"
