"""Places of a checkpoint's tensors: complete parameters, or rows of parameters of fused layers."""

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
    """Copy a tensor without checking the numbers, and return True."""
    target.copy_(source)
    return True


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Entries ``start`` to ``stop`` along ``dim`` of a parameter; all entries if dim is None.

    Attributes:
        parameter: as registered, on the meta device; stands for the parameter in memory.
        index: number of an expert's matrix in a stacked parameter; the other fields refer to that
            matrix. None if matrices are not stacked.
        slice: the shard of the stored tensor that this rank reads. The other fields describe the
            shard. None if the tensor is replicated.
    """

    parameter: nn.Parameter
    dim: int | None = None
    start: int = 0
    stop: int = 0
    index: int | None = None
    slice: Slice | None = None

    @property
    def is_optional(self) -> bool:
        """Say whether the parameter has a default, for checkpoints without the tensor."""
        return hasattr(self.parameter, "default")

    @property
    def takes_any_form(self) -> bool:
        """Say whether the parameter keeps the stored tensor with its own shape and dtype."""
        return getattr(self.parameter, "any_form", False)

    @property
    def is_transposed(self) -> bool:
        """Say whether the tensor is stored as ``[I, O]`` for a parameter ``[O, I]``."""
        return getattr(self.parameter, "stored_transposed", False)

    def shard(self, name: str, tensor: torch.Tensor, path: object) -> torch.Tensor:
        """Return this rank's shard of a stored tensor, as a view if the shard is one range.

        Raises: CheckpointError: the size differs from the config, or entries are numbers of groups
            that other ranks have.
        """
        slice_ = self.slice
        if slice_ is None:
            return tensor
        dim = self.stored_dim(slice_.dim)
        size = tensor.shape[dim] if dim < tensor.ndim else 1
        if size != slice_.whole:
            raise CheckpointError(
                path,
                f"tensor {name!r} has shape {list(tensor.shape)}, the config asks for "
                f"{slice_.whole} in dimension {dim}",
            )
        if slice_.is_elsewhere:
            return torch.zeros_like(tensor)
        shard = slice_.of(tensor, dim)
        if slice_.stated is not None:
            # The tensor holds sizes of the layer. Replace correct ones by those of the shard, and
            # keep wrong ones, which the layer's own check will refuse.
            layer_sizes, shard_sizes = (
                torch.tensor(sizes, dtype=tensor.dtype) for sizes in slice_.stated
            )
            is_correct = torch.equal(shard.cpu(), layer_sizes)
            return shard_sizes.to(tensor.device) if is_correct else shard
        if slice_.groups is None:
            return shard
        # Renumber groups from the first one of this rank.
        first, last = slice_.groups
        if shard.numel() and not first <= int(shard.min()) <= int(shard.max()) < last:
            raise CheckpointError(
                path,
                f"tensor {name!r} orders inputs by their activation, so that the inputs of one "
                "rank have groups of all of them",
                "quantize with desc_act=False, or run the model in one process",
            )
        return shard - first

    def stored_dim(self, dim: int) -> int:
        """Return the dimension of the stored tensor that is ``dim`` of the parameter."""
        # Only the two matrix dimensions are swapped.
        return 1 - dim if self.is_transposed and dim < 2 else dim

    def takes_rows(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Say whether a stored tensor can be received by rows, entries of the first dimension.

        The answer is False if the tensor differs in form from the place, or if the parameter holds
        values that are computed from the tensor.
        """
        if self.takes_any_form or not shape or not self.takes(dtype, self.parameter.dtype):
            return False
        expected, shard = list(self.stored(self.parameter).shape), self.slice
        if shard is not None:
            dim = self.stored_dim(shard.dim)
            is_computed = shard.is_elsewhere or shard.stated or shard.groups is not None
            if is_computed or dim >= len(expected):
                return False
            expected[dim] = shard.whole
        return list(shape) == expected

    def can_borrow(
        self, tensor: torch.Tensor, data: torch.Tensor, is_result_copied: bool = False
    ) -> bool:
        """Say whether ``tensor`` may replace the parameter ``data`` until the layer is finalized.

        Args:
            is_result_copied: parts of the tensor that the finalized layer keeps are copied.
        """
        is_same_form = (tensor.shape, tensor.dtype, tensor.device) == (
            (data.shape, data.dtype, data.device)
        )
        is_complete = self.index is None and self.of(data).shape == data.shape
        is_temporary = is_result_copied or getattr(self.parameter, "passing", False)
        is_plain = tensor.is_contiguous() and not self.is_transposed
        return is_temporary and is_same_form and is_complete and is_plain

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the view of this place on ``data``, which has the parameter's shape."""
        if self.index is not None:
            data = data[self.index]
        if self.dim is None:
            return data
        return data.narrow(self.dim, self.start, self.stop - self.start)

    def fitting(self, name: str, tensor: torch.Tensor, path: object) -> torch.Tensor:
        """Return the stored tensor in the shape of the place, as a view.

        Raises: CheckpointError: the shape is another one.
        """
        expected = list(self.stored(self.parameter).shape)
        if tensor.ndim == 0 and math.prod(expected) == 1:
            tensor = tensor.reshape(expected)
        while tensor.ndim > len(expected) and tensor.shape[-1] == 1:
            tensor = tensor.squeeze(-1)  # some writers store scales in a shape for broadcasting
        if list(tensor.shape) != expected:
            raise CheckpointError(
                path,
                f"tensor {name!r} has shape {list(tensor.shape)}, the config asks for {expected}",
            )
        return tensor

    def stored(self, data: torch.Tensor) -> torch.Tensor:
        """Return the view of this place on ``data`` in the layout of the checkpoint."""
        return self.of(data).mT if self.is_transposed else self.of(data)

    def write(
        self,
        name: str,
        tensor: torch.Tensor,
        data: torch.Tensor,
        path: object,
        copy: Copy = plain_copy,
    ) -> bool:
        """Copy a stored tensor to its place in ``data``, and return the result of ``copy``.

        Raises: CheckpointError: shape or kind of dtype differ from the place.
        """
        entries = self.stored(data)
        tensor = self.fitting(name, tensor, path)
        if not self.takes(tensor.dtype, data.dtype):
            raise CheckpointError(
                path,
                f"tensor {name!r} is stored as {tensor.dtype}, expected {data.dtype}",
                "restore the quantization_config that the checkpoint was published with",
            )
        return copy(entries, tensor)

    @staticmethod
    def takes(stored: torch.dtype, expected: torch.dtype) -> bool:
        """Say whether numbers of a stored dtype can be converted to the parameter's dtype."""
        # 8-bit numbers need scales, which rounding another dtype could not provide.
        can_round = (
            stored.is_floating_point and expected.is_floating_point and expected.itemsize > 1
        )
        return stored == expected or can_round

    def write_default(self, data: torch.Tensor) -> None:
        """Fill the place in ``data`` with the parameter's default, a number or a function."""
        default = self.parameter.default  # type: ignore[attr-defined]
        entries = self.of(data)
        if callable(default):
            entries.copy_(self.of(default()))
        else:
            entries.fill_(default)


def places_of(layers: Iterable[PluggableLayer]) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Return the place of every tensor by its name in checkpoints, and the tied names.

    A tensor's name is the layer's prefix with the name of the parameter, or the parameter's
    ``stored_as``. A parameter that two layers share has the name in the first layer. The tied names
    map the name in the second layer to that name.
    """
    places: dict[str, TensorPlace] = {}
    tied: dict[str, str] = {}
    owners: dict[int, str] = {}
    for layer in layers:
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            stored_name = getattr(parameter, "stored_as", f"{layer.prefix}.{name}")
            if id(parameter) in owners:  # tied: the first layer's name counts
                tied[stored_name] = owners[id(parameter)]
                continue
            owners[id(parameter)] = stored_name
            if isinstance(layer, _PROJECTIONS) and not hasattr(parameter, "stored_as"):
                places.update(_shards(layer, name, parameter))
            elif hasattr(parameter, "expert_parts"):
                places.update(_matrices(layer, name, parameter))
            else:
                places[stored_name] = TensorPlace(parameter, slice=_slice(layer, "", name))
    return places, tied


def _slice(layer: PluggableLayer, part: str, name: str) -> Slice | None:
    """Return the shard that this rank reads of the tensors of a parameter; None if replicated."""
    slices: Slices = getattr(layer, "slices", {})
    return slices.get((part, name))


def held_elsewhere(layers: Iterable[PluggableLayer]) -> frozenset[str]:
    """Return the checkpoint names of tensors that only other ranks hold."""
    return frozenset(
        f"{parent}{dot}{part}.{name}"
        for layer in layers
        for name in getattr(layer, "elsewhere", ())
        for parent, dot, _ in [layer.prefix.rpartition(".")]
        for part in getattr(layer, "parts", ())
    )


def absent_biases(layers: Iterable[PluggableLayer]) -> frozenset[str]:
    """Return the names that checkpoints would give to biases of linear layers without a bias."""
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
        # A parameter with one entry per part ignores the sizes of the parts.
        numerator, denominator = (1, len(parts)) if per_part else (size, total)
        rows = numerator * parameter.shape[dim] // denominator
        place = TensorPlace(parameter, dim, start, start + rows, slice=_slice(layer, part, name))
        yield f"{parent}{dot}{part}.{name}", place
        start += rows


def _matrices(
    layer: PluggableLayer, name: str, parameter: nn.Parameter
) -> Iterator[tuple[str, TensorPlace]]:
    """Yield the place of each expert's matrix of a stacked parameter, which is stored by expert."""
    stored = getattr(parameter, "expert_tensor", "weight")
    for expert in range(parameter.shape[0]):
        start = 0
        for part, size in parameter.expert_parts.items():  # type: ignore[attr-defined]
            shard = _slice(layer, part, name)
            place = TensorPlace(parameter, 0, start, start + size, expert, shard)
            yield f"{layer.prefix}.{expert}.{part}.{stored}", place
            start += size
