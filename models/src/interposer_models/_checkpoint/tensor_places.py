"""The places of a checkpoint's tensors: whole parameters, or rows of those of fused layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from interposer import PluggableLayer
from interposer.errors import CheckpointError
from interposer_models._decoder.latent_attention import LatentProjection
from interposer_ops.layers.cuts import Slice, Slices
from interposer_ops.layers.linear import Linear

_PROJECTIONS = Linear, LatentProjection

Copy = Callable[[torch.Tensor, torch.Tensor], bool]
"""Copies the second tensor to the first, and returns whether all numbers are finite."""


def plain_copy(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy a tensor and search for nothing."""
    target.copy_(source)
    return True


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Entries ``start`` to ``stop`` along ``dim`` of a parameter; all of it if dim is None.

    Attributes:
        index: of the matrix among those of all experts, to which the rest refers then.
        parameter: as it was registered, on the meta device; it stands for the one in memory.
        slice: what this rank reads of the stored tensor, which all else is about; None: all of it.
    """

    parameter: nn.Parameter
    dim: int | None = None
    start: int = 0
    stop: int = 0
    index: int | None = None
    slice: Slice | None = None

    @property
    def is_optional(self) -> bool:
        """Return True if the parameter has a default, for checkpoints without it."""
        return hasattr(self.parameter, "default")

    @property
    def takes_any_form(self) -> bool:
        """Return True if the parameter keeps the stored tensor with its own shape and dtype."""
        return getattr(self.parameter, "any_form", False)

    @property
    def is_transposed(self) -> bool:
        """Say whether the tensor is stored as ``[I, O]`` for a parameter ``[O, I]``."""
        return getattr(self.parameter, "stored_transposed", False)

    def share(self, name: str, tensor: torch.Tensor, path: object) -> torch.Tensor:
        """Return what this rank reads of a stored tensor: a view of it, where that is one range.

        Raises: CheckpointError: it has another size than the config asks for, or numbers groups
            that other ranks hold.
        """
        cut = self.slice
        if cut is None:
            return tensor
        dim = self.stored_dim(cut.dim)
        found = tensor.shape[dim] if dim < tensor.ndim else 1
        if found != cut.whole:
            raise CheckpointError(
                path,
                f"tensor {name!r} has shape {list(tensor.shape)}, the config asks for {cut.whole} "
                f"in dimension {dim}",
            )
        if cut.is_elsewhere:
            return torch.zeros_like(tensor)
        share = cut.of(tensor, dim)
        if cut.stated is not None:
            # What contradicts the whole layer contradicts its share as well.
            before, after = (torch.tensor(sizes, dtype=tensor.dtype) for sizes in cut.stated)
            return after.to(tensor.device) if torch.equal(share.cpu(), before) else share
        if cut.groups is None:
            return share
        first, last = cut.groups
        if share.numel() and not first <= int(share.min()) <= int(share.max()) < last:
            raise CheckpointError(
                path,
                f"tensor {name!r} orders inputs by their activation, so that the inputs of one "
                "rank have groups of all of them",
                "quantize with desc_act=False, or run the model in one process",
            )
        return share - first

    def stored_dim(self, dim: int) -> int:
        """Return the dimension of a stored tensor that is ``dim`` of the parameter."""
        return 1 - dim if self.is_transposed and dim < 2 else dim

    def takes_rows(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Say whether a stored tensor can be taken some rows, of its first dimension, at a time.

        It cannot where it has another form than the place, or what is held is computed of it.
        """
        if self.takes_any_form or not shape or not self.takes(dtype, self.parameter.dtype):
            return False
        wanted, cut = list(self.stored(self.parameter).shape), self.slice
        if cut is not None:
            dim = self.stored_dim(cut.dim)
            if cut.is_elsewhere or cut.stated or cut.groups is not None or dim >= len(wanted):
                return False
            wanted[dim] = cut.whole
        return list(shape) == wanted

    def can_borrow(self, tensor: torch.Tensor, whole: torch.Tensor, is_left: bool = False) -> bool:
        """Say whether ``tensor`` may stand for ``whole`` while the layer is finalized.

        Args:
            is_left: what the layer keeps of it then is copied.
        """
        alike = (tensor.shape, tensor.dtype, tensor.device) == (
            (whole.shape, whole.dtype, whole.device)
        )
        is_all = self.index is None and self.of(whole).shape == whole.shape
        passing = is_left or getattr(self.parameter, "passing", False)
        return passing and alike and is_all and tensor.is_contiguous() and not self.is_transposed

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of this place on ``whole``, which has the parameter's shape."""
        if self.index is not None:
            whole = whole[self.index]
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def fitting(self, name: str, tensor: torch.Tensor, path: object) -> torch.Tensor:
        """Return the checkpoint's ``tensor`` in the shape of the place, of which no memory is read.

        Raises: CheckpointError: it has another one.
        """
        expected = list(self.stored(self.parameter).shape)
        if tensor.ndim == 0 and math.prod(expected) == 1:
            tensor = tensor.reshape(expected)
        while tensor.ndim > len(expected) and tensor.shape[-1] == 1:
            tensor = tensor.squeeze(-1)  # as scales are stored that are to be broadcast
        if list(tensor.shape) != expected:
            raise CheckpointError(
                path,
                f"tensor {name!r} has shape {list(tensor.shape)}, the config asks for {expected}",
            )
        return tensor

    def stored(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view on ``whole`` as the checkpoint has it."""
        return self.of(whole).mT if self.is_transposed else self.of(whole)

    def write(
        self,
        name: str,
        tensor: torch.Tensor,
        whole: torch.Tensor,
        path: object,
        copy: Copy = plain_copy,
    ) -> bool:
        """Copy the checkpoint's ``tensor`` to its place in ``whole``; return what ``copy`` does.

        Raises: CheckpointError: shape or kind of dtype are not those of the place.
        """
        entries = self.stored(whole)
        tensor = self.fitting(name, tensor, path)
        if not self.takes(tensor.dtype, whole.dtype):
            raise CheckpointError(
                path,
                f"tensor {name!r} is stored as {tensor.dtype}, expected {whole.dtype}",
                "restore the quantization_config that the checkpoint was published with",
            )
        return copy(entries, tensor)

    @staticmethod
    def takes(stored: torch.dtype, held: torch.dtype) -> bool:
        """Say whether numbers of a stored dtype can be held in another one."""
        # Numbers of 8 bits mean something with their scales only, so nothing is rounded to them.
        rounded = stored.is_floating_point and held.is_floating_point and held.itemsize > 1
        return stored == held or rounded

    def write_default(self, whole: torch.Tensor) -> None:
        """Fill the place in ``whole`` with the default of the parameter, a number or a function."""
        default = self.parameter.default  # type: ignore[attr-defined]
        entries = self.of(whole)
        if callable(default):
            entries.copy_(self.of(default()))
        else:
            entries.fill_(default)


def places_of(layers: Iterable[PluggableLayer]) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Return the place of every tensor by the name that checkpoints use, and the tied names.

    That is the layer's prefix with the name of the parameter, unless its ``stored_as`` is another.
    A parameter of two layers has the name that the first one gives it. What the second one would
    call it is a key of the tied names, whose values are those that are used.
    """
    places: dict[str, TensorPlace] = {}
    tied: dict[str, str] = {}
    owners: dict[int, str] = {}
    for layer in layers:
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            full = getattr(parameter, "stored_as", f"{layer.prefix}.{name}")
            if id(parameter) in owners:
                tied[full] = owners[id(parameter)]
                continue
            owners[id(parameter)] = full
            if isinstance(layer, _PROJECTIONS) and not hasattr(parameter, "stored_as"):
                places.update(_shards(layer, name, parameter))
            elif hasattr(parameter, "expert_parts"):
                places.update(_matrices(layer, name, parameter))
            else:
                places[full] = TensorPlace(parameter, slice=_slice(layer, "", name))
    return places, tied


def _slice(layer: PluggableLayer, part: str, name: str) -> Slice | None:
    """Return what this rank reads of the tensors of a parameter."""
    slices: Slices = getattr(layer, "slices", {})
    return slices.get((part, name))


def held_elsewhere(layers: Iterable[PluggableLayer]) -> frozenset[str]:
    """Return the names that checkpoints give to what another rank holds."""
    return frozenset(
        f"{parent}{dot}{part}.{name}"
        for layer in layers
        for name in getattr(layer, "elsewhere", ())
        for parent, dot, _ in [layer.prefix.rpartition(".")]
        for part in getattr(layer, "parts", ())
    )


def absent_biases(layers: Iterable[PluggableLayer]) -> frozenset[str]:
    """Return the names that checkpoints give to biases, of linear layers without one."""
    return frozenset(
        f"{parent}{dot}{part}.bias"
        for layer in layers
        if isinstance(layer, _PROJECTIONS) and layer._parameters.get("bias") is None
        for parent, dot, _ in [layer.prefix.rpartition(".")]
        for part in layer.parts
    )


def _shards(
    layer: Linear | LatentProjection, name: str, parameter: nn.Parameter
) -> Iterator[tuple[str, TensorPlace]]:
    parent, dot, _ = layer.prefix.rpartition(".")
    dim = getattr(parameter, "shard_dim", 0)
    parts = {part: layer.parts[part] for part in getattr(parameter, "parts", layer.parts)}
    total = sum(parts.values())
    per_part = getattr(parameter, "per_part", False)
    start = 0
    for part, size in parts.items():
        share, whole = (1, len(parts)) if per_part else (size, total)
        rows = share * parameter.shape[dim] // whole
        place = TensorPlace(parameter, dim, start, start + rows, slice=_slice(layer, part, name))
        yield f"{parent}{dot}{part}.{name}", place
        start += rows


def _matrices(
    layer: PluggableLayer, name: str, parameter: nn.Parameter
) -> Iterator[tuple[str, TensorPlace]]:
    """Yield the places of tensors of each expert's matrices, stored one by one."""
    stored = getattr(parameter, "expert_tensor", "weight")
    for expert in range(parameter.shape[0]):
        start = 0
        for part, size in parameter.expert_parts.items():  # type: ignore[attr-defined]
            cut = _slice(layer, part, name)
            place = TensorPlace(parameter, 0, start, start + size, expert, cut)
            yield f"{layer.prefix}.{expert}.{part}.{stored}", place
            start += size
