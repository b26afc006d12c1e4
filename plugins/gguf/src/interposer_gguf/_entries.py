"""Tensors of a GGUF file, converted to the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from interposer.errors import CheckpointError
from interposer_gguf._architecture import Join
from interposer_gguf._block_formats import FORMATS
from interposer_gguf._conversions import RowSplit
from interposer_gguf._file_format import GGUFFile, StoredTensor
from interposer_gguf._microscaling import LAYOUTS, MXFP4, unpacked

NamedTensors = Iterator[tuple[str, torch.Tensor]]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Entry(ABC):
    """Base class: tensors of a GGUF file, and the conversion to checkpoint tensors.

    Attributes:
        name: name of the checkpoint tensor. A weight that stays in blocks ends with the name of the
            block format instead of ``weight``.
    """

    file: GGUFFile
    stored: StoredTensor
    name: str

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the checkpoint tensors, in the order of ``tensors``."""

    @property
    def formats_by_layer(self) -> Mapping[str, str]:
        """The block formats of the layers that stay in blocks, by name of the layer."""
        return {}

    @property
    def num_bytes(self) -> int:
        """The total size of the checkpoint tensors in bytes."""
        return size_of(self.stored, floats=not self.formats_by_layer)

    @abstractmethod
    def tensors(self) -> NamedTensors:
        """Yield the name and value of each checkpoint tensor.

        Raises: CheckpointError: the file became shorter, or a tensor has a wrong shape.
        """

    def convert(self, function: Callable[..., Any], *values: Any) -> Any:
        """Apply a conversion function to tensors of a file; shape errors become CheckpointError.

        Raises: CheckpointError: the shapes do not fit the metadata.
        """
        try:
            return function(*values)
        except (RuntimeError, ValueError, IndexError) as error:
            # Torch's own error would not name the tensor.
            raise CheckpointError(
                self.file.path,
                f"stores {self.stored.name!r} with the shape {self.stored.shape}, which the "
                "metadata contradicts",
            ) from error


@dataclass(frozen=True)
class SingleTensor(Entry):
    """A tensor of the file that becomes one checkpoint tensor.

    Attributes:
        in_blocks: the tensor stays in blocks.
        change: converts the values, or the bytes if the tensor stays in blocks.
    """

    in_blocks: bool
    change: Change

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the checkpoint tensor."""
        return (_parameter(self.name, self.stored if self.in_blocks else None),)

    @property
    def formats_by_layer(self) -> Mapping[str, str]:
        """The block format of the layer, if the tensor stays in blocks."""
        return {_layer(self.name): self.stored.stored_as} if self.in_blocks else {}

    def tensors(self) -> NamedTensors:
        """Yield the name and the converted tensor."""
        values = self.file.read(self.stored)
        if not self.in_blocks:
            values = floats(self.stored, values)
        yield self.names[0], self.convert(self.change, values)


@dataclass(frozen=True)
class PerExpert(Entry):
    """The matrices ``[E, outputs, inputs]`` of all experts, each a separate checkpoint tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each expert's tensor."""
        name = _parameter(self.name, self.stored if self._in_blocks else None)
        return tuple(name.format(expert) for expert in range(self.stored.shape[0]))

    @property
    def formats_by_layer(self) -> Mapping[str, str]:
        """The block format of each expert's layer, if the matrices stay in blocks."""
        return {_layer(name): self.stored.stored_as for name in self.names if self._in_blocks}

    def tensors(self) -> NamedTensors:
        """Yield the matrices of the experts one by one."""
        for name, matrix in zip(self.names, self.file.read(self.stored), strict=True):
            yield name, matrix if self._in_blocks else floats(self.stored, matrix)

    @property
    def _in_blocks(self) -> bool:
        return self.stored.stored_as in FORMATS


@dataclass(frozen=True)
class JoinedTensors(Entry):
    """Two tensors of the file that are joined to one checkpoint tensor by ``join``."""

    second: StoredTensor
    join: Join

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the joined tensor."""
        return (self.name,)

    @property
    def num_bytes(self) -> int:
        """The size of both tensors as float32, in bytes."""
        return size_of(self.stored, floats=True) + size_of(self.second, floats=True)

    def tensors(self) -> NamedTensors:
        """Yield the joined tensor."""
        both = (floats(part, self.file.read(part)) for part in (self.stored, self.second))
        yield self.name, self.convert(self.join, *both)


@dataclass(frozen=True)
class SplitTensor(Entry):
    """A tensor of the file whose rows are split into several checkpoint tensors.

    Attributes:
        name: prefix of the modules' names.
    """

    config: Mapping[str, Any]
    row_split: RowSplit

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each part's tensor."""
        stored = self.stored if self._in_blocks else None
        return tuple(
            _parameter(f"{self.name}{name}.weight", stored) for name in self.row_split.names
        )

    @property
    def formats_by_layer(self) -> Mapping[str, str]:
        """The block format of each part's layer, if the parts stay in blocks."""
        return {_layer(name): self.stored.stored_as for name in self.names if self._in_blocks}

    def tensors(self) -> NamedTensors:
        """Yield the name and the rows of each part."""
        values = self.file.read(self.stored)
        if not self._in_blocks:
            values = floats(self.stored, values)
        parts = self.convert(self.row_split.function, values, self.config)
        yield from zip(self.names, parts, strict=True)

    @property
    def _in_blocks(self) -> bool:
        return self.stored.stored_as in FORMATS


@dataclass(frozen=True)
class Microscaled(Entry):
    """The matrices of all experts in MXFP4, stored in checkpoints as blocks and scales.

    Attributes:
        name: prefix of ``_blocks`` and ``_scales``.
        second: a tensor to interleave with ``stored`` row by row, or None.
    """

    second: StoredTensor | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors of blocks and of scales."""
        return f"{self.name}_blocks", f"{self.name}_scales"

    @property
    def formats_by_layer(self) -> Mapping[str, str]:
        """The block format (MXFP4) of the experts, by layer name."""
        return {_layer(self.name): MXFP4.name}

    @property
    def num_bytes(self) -> int:
        """The size of the file's tensors in bytes, which conversion does not change."""
        return self.stored.num_bytes + (self.second.num_bytes if self.second else 0)

    def tensors(self) -> NamedTensors:
        """Yield the blocks, then the scales."""
        rows = self.file.read(self.stored)
        if self.second is not None:
            rows = self.convert(interleave_rows, rows, self.file.read(self.second))
        yield from zip(self.names, unpacked(rows), strict=True)


def interleave_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of two tensors ``[E, O, ...]``; the result is ``[E, 2 O, ...]``."""
    return torch.stack((first, second), 2).flatten(1, 2)


def floats(stored: StoredTensor, values: torch.Tensor) -> torch.Tensor:
    """Return the values as floats, dequantized if ``stored`` is in blocks."""
    if not stored.in_blocks:
        return values
    return LAYOUTS[stored.stored_as].dequantized(values, torch.float32)


def size_of(stored: StoredTensor, floats: bool) -> int:
    """Return the bytes of a tensor, after dequantization to float32 if ``floats``."""
    if not (floats and stored.in_blocks):
        return stored.num_bytes
    layout = LAYOUTS[stored.stored_as]
    return layout.row_numbers(stored.num_bytes) * torch.float32.itemsize


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _parameter(name: str, in_blocks: StoredTensor | None) -> str:
    return name if in_blocks is None else f"{name.removesuffix('.weight')}.{in_blocks.stored_as}"
