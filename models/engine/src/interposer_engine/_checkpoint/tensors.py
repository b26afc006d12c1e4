"""Mapping of checkpoint tensors to the parameters of a model, and to this rank's shards.

A ``TensorPlace`` is a complete parameter, rows of the parameter of a fused layer, or an expert's
matrix in a stacked parameter. ``ExpertNames`` translates names under expert parallelism: a layer
numbers the experts of its rank from 0, while checkpoints number all experts of the layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from interposer import CausalModel, CheckpointFile, ModelFamily, PluggableLayer
from interposer.errors import CheckpointError
from interposer_engine._checkpoint.files import Checkpoint, file_of, reading
from interposer_models.decoder import DecoderSettings, LatentProjection
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.sharded_experts import ExpertParallelExperts
from interposer_ops.layers.tensor_parallel.sharding import Slice, Slices

_PROJECTIONS = Linear, LatentProjection

Copy = Callable[[torch.Tensor, torch.Tensor], bool]
"""Copies the second tensor to the first, and returns whether all numbers are finite."""


def plain_copy(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy a tensor without checking for NaN or infinity, and return True."""
    target.copy_(source)
    return True


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's place in a parameter: entries ``start`` to ``stop`` along ``dim``, or all entries.

    Attributes:
        parameter: the parameter as registered, on the meta device.
        index: number of an expert's matrix in a stacked parameter; the other fields refer to that
            matrix. None if matrices are not stacked.
        slice: the shard of the stored tensor that this rank reads. The other fields describe the
            shard. None if the tensor is replicated.
        is_required: the checkpoint must have the tensor, even if the parameter has a default.
    """

    parameter: nn.Parameter
    dim: int | None = None
    start: int = 0
    stop: int = 0
    index: int | None = None
    slice: Slice | None = None
    is_required: bool = False

    @property
    def is_optional(self) -> bool:
        """Say whether the parameter has a default, for checkpoints without the tensor."""
        return hasattr(self.parameter, "default") and not self.is_required

    @property
    def takes_any_form(self) -> bool:
        """Say whether the parameter adopts the shape and dtype of the stored tensor."""
        return getattr(self.parameter, "any_form", False)

    @property
    def is_transposed(self) -> bool:
        """Say whether the tensor is stored as ``[I, O]`` for a parameter ``[O, I]``."""
        return getattr(self.parameter, "stored_transposed", False)

    @property
    def takes_either_order(self) -> bool:
        """Say whether the tensor may be stored with its last two dimensions swapped."""
        return getattr(self.parameter, "stored_either_way", False)

    def shard(self, name: str, tensor: torch.Tensor, path: object) -> torch.Tensor:
        """Return this rank's shard of a stored tensor, as a view if the shard is one range.

        Raises: CheckpointError: the size differs from the config, or entries are numbers of groups
            that other ranks have.
        """
        if self.takes_either_order and tensor.ndim > 1:
            expected = self._complete_shape()
            if list(tensor.shape) != expected and list(tensor.mT.shape) == expected:
                tensor = tensor.mT
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
                f"tensor {name!r} is reordered by activation (desc_act), so the inputs of one rank "
                "would need the scales of every rank's groups",
                "quantize with desc_act=False, or run the model in one process",
            )
        return shard - first

    def stored_dim(self, dim: int) -> int:
        """Return the dimension of the stored tensor that is ``dim`` of the parameter."""
        # Only the two matrix dimensions are swapped.
        return 1 - dim if self.is_transposed and dim < 2 else dim

    def takes_rows(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Say whether a stored tensor can arrive in parts along its first dimension.

        The answer is False if the tensor differs in form from the place, or if the parameter holds
        values that are computed from the tensor.
        """
        if self.takes_any_form or not shape or not self.takes(dtype, self.parameter.dtype):
            return False
        shard = self.slice
        if shard is not None:
            dim = self.stored_dim(shard.dim)
            is_computed = shard.is_elsewhere or shard.stated or shard.groups is not None
            if is_computed or dim >= self.stored(self.parameter).ndim:
                return False
        return list(shape) == self._complete_shape()

    def _complete_shape(self) -> list[int]:
        """Return the shape of the stored tensor, of which this rank reads a shard."""
        shape = list(self.stored(self.parameter).shape)
        if self.slice is not None:
            shape[self.stored_dim(self.slice.dim)] = self.slice.whole
        return shape

    def can_borrow(
        self, tensor: torch.Tensor, data: torch.Tensor, is_result_copied: bool = False
    ) -> bool:
        """Say whether ``tensor`` may serve as the parameter ``data`` until the layer is finalized.

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
        """Return this place's view of ``data``, which has the parameter's shape."""
        if self.index is not None:
            data = data[self.index]
        if self.dim is None:
            return data
        return data.narrow(self.dim, self.start, self.stop - self.start)

    def fitting(self, name: str, tensor: torch.Tensor, path: object) -> torch.Tensor:
        """Return the stored tensor as a view in the shape of the place.

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
        """Return this place's view of ``data``, transposed if the checkpoint stores ``[I, O]``."""
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
    """Return the place of every checkpoint tensor by name, and the names of tied tensors.

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
    """Return the shard of a parameter's tensors that this rank reads; None if replicated."""
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
    """Return the names that bias tensors would have, for linear layers without a bias."""
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
        # Some linear layers have a bias in some parts only; a default then fills the others.
        is_required = part not in getattr(parameter, "default_parts", parts)
        shard = _slice(layer, part, name)
        place = TensorPlace(
            parameter, dim, start, start + rows, slice=shard, is_required=is_required
        )
        yield f"{parent}{dot}{part}.{name}", place
        start += rows


def _matrices(
    layer: PluggableLayer, name: str, parameter: nn.Parameter
) -> Iterator[tuple[str, TensorPlace]]:
    """Yield the place of each expert's matrix in a parameter that stacks all experts' matrices."""
    stored = getattr(parameter, "expert_tensor", "weight")
    for expert in range(parameter.shape[0]):
        start = 0
        for part, size in parameter.expert_parts.items():  # type: ignore[attr-defined]
            shard = _slice(layer, part, name)
            place = TensorPlace(parameter, 0, start, start + size, expert, shard)
            yield f"{layer.prefix}.{expert}.{part}.{stored}", place
            start += size


_NUMBER = re.compile(r"\.(\d+)\.")


class ExpertNames:
    """Translates names of expert tensors between the checkpoint and the layers of this rank."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers_by_prefix = {
            layer.prefix: layer for layer in layers if isinstance(layer, ExpertParallelExperts)
        }

    def stored(self, name: str) -> str:
        """Return the checkpoint's name of the tensor that a layer calls ``name``."""
        for layer, number, match in self._experts(name):
            return _renumber(name, match, layer.local_expert_ids[number])
        return name

    def local(self, name: str) -> str:
        """Return the layer's name of the checkpoint tensor ``name`` of an expert on this rank."""
        for layer, number, match in self._experts(name):
            return _renumber(name, match, layer.local_expert_ids.index(number))
        return name

    def is_elsewhere(self, name: str) -> bool:
        """Say whether the checkpoint tensor ``name`` belongs to an expert of another rank."""
        return any(
            number < layer.num_routed and number not in layer.local_expert_ids
            for layer, number, _ in self._experts(name)
        )

    def _experts(self, name: str) -> Iterable[tuple[ExpertParallelExperts, int, re.Match[str]]]:
        """Yield layer, expert number and regex match of a name, if an expert has the tensor."""
        if not self._layers_by_prefix:
            return
        # A name has the numbers of block and expert: the prefix of a layer ends before the expert.
        for match in _NUMBER.finditer(name):
            layer = self._layers_by_prefix.get(name[: match.start()])
            if layer is not None:
                yield layer, int(match[1]), match
                return


def _renumber(name: str, match: re.Match[str], number: int) -> str:
    return f"{name[: match.start(1)]}{number}{name[match.end(1) :]}"


# Probable cause and next action, by a pattern of the tensor's name.
_CAUSES = {
    r"\.lora_(A|B|embedding)": (
        "an adapter was saved with the model",
        "merge it by PEFT's merge_and_unload() before saving, or give its folder as an adapter",
    ),
    r"^base_model\.model\.": (
        "the names are those of a model that PEFT wraps",
        "merge it by PEFT's merge_and_unload() and save the result",
    ),
    r"^(module|_orig_mod|_fsdp_wrapped_module)\.": (
        "the names are those of a model that a trainer or torch.compile wraps",
        "save the model inside of the wrapper: model.module or model._orig_mod",
    ),
    r"\.(qweight|qzeros|g_idx|scales|absmax|quant_map|SCB|weight_format|pre_quant_scale)$"
    r"|\.weight_(scale(_inv|_2)?|packed|shape|zero_point|global_scale|g_idx)$"
    r"|\.(input|activation)_(scale|zero_point|global_scale)$"
    r"|_(blocks|scales)$|\.quant_state\.": (
        "it belongs to a quantized layer, but the settings of the checkpoint state no such "
        "quantization of that layer",
        "restore the quantization_config that the checkpoint was published with",
    ),
    r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.": (
        "it belongs to an encoder of images or sounds, and the architecture is one of texts alone",
        "restore the architectures of the published config.json",
    ),
    r"(^|\.)mtp[._]": (
        "it predicts further tokens, and the family reads no such layers",
        "remove the tensors that the name begins",
    ),
}
_MEND = "check that architectures and num_hidden_layers of config.json are those of the weights"


def unplaced_tensor_error(stored: str, name: str, path: object) -> CheckpointError:
    """Return the error for a checkpoint tensor without a place in the model, and the likely cause.

    Args:
        stored: the tensor's name in the checkpoint.
        name: the tensor's name in the model.
        path: path of the checkpoint.
    """
    # The name in the model helps if the family renames tensors.
    alias = "" if stored == name else f" (here {name!r})"
    reason = f"holds the tensor {stored!r}{alias}, which the model has no place for"
    for pattern, (cause, mend) in _CAUSES.items():
        if re.search(pattern, stored):
            return CheckpointError(file_of(stored, path), f"{reason}: {cause}", mend)
    return CheckpointError(file_of(stored, path), reason, _MEND)


_CHUNK_BYTES = 2**24


def with_untied_head(
    decoder: ModelFamily, checkpoint: Checkpoint | CheckpointFile
) -> tuple[ModelFamily, list[str]]:
    """Untie embedding and LM head in the settings if the checkpoint stores a different head.

    transformers also uses such a head, regardless of ``tie_word_embeddings``.

    Returns: the settings, and a note if they changed.
    """
    if not isinstance(decoder, DecoderSettings) or not decoder.tie_word_embeddings:
        return decoder, []
    frame = decoder.frame
    table, head = f"{frame.decoder}.{frame.embedding}.weight", f"{frame.head}.weight"
    stored = stored_names(checkpoint, decoder.renamed, frame.decoder)
    if not {table, head} <= stored.keys() or _are_equal(checkpoint, stored[table], stored[head]):
        return decoder, []
    note = (
        f"config.json says tie_word_embeddings, but {stored[head]!r} of the checkpoint differs "
        f"from {stored[table]!r}: the stored head is used"
    )
    return decoder.model_copy(update={"tie_word_embeddings": False}), [note]


def check_tied(checkpoint: Checkpoint | CheckpointFile, model: CausalModel) -> None:
    """Refuse a checkpoint that stores unequal tensors for tensors that the model ties.

    Raises: CheckpointError: two such tensors differ.
    """
    tied = places_of(layer for layer in model.modules() if isinstance(layer, PluggableLayer))[1]
    frame = getattr(getattr(model, "config", None), "frame", None)
    names = getattr(model, "renamed", str), getattr(frame, "decoder", "")
    stored = stored_names(checkpoint, *names) if tied else {}
    for copy, original in tied.items():
        pair = [stored[name] for name in (original, copy) if name in stored]
        if len(pair) == 2 and not _are_equal(checkpoint, *pair):
            raise CheckpointError(
                checkpoint.path,
                f"holds {pair[1]!r}, which differs from {pair[0]!r}, but the model computes with "
                "one of them in both places",
                "load the folder that the weights are in, or set tie_word_embeddings to false in "
                "config.json",
            )


def stored_names(
    checkpoint: Checkpoint | CheckpointFile,
    renamed: Callable[[str], str | None],
    decoder: str,
) -> dict[str, str]:
    """Return the checkpoint's name of each tensor, keyed by the tensor's name in the model.

    Empty if the weights are not on the disk yet, or need a plugin.
    """
    if not isinstance(checkpoint, Checkpoint):
        return {}
    names = checkpoint.names()
    # A decoder that was saved without its head has names without the decoder's prefix.
    prefixed = {f"{decoder}.{name}": name for name in names}
    return {**prefixed, **{renamed(name) or name: name for name in names}}


def _are_equal(checkpoint: Checkpoint | CheckpointFile, *names: str) -> bool:
    """Compare two tensors of a checkpoint, some rows at a time to save memory."""
    assert isinstance(checkpoint, Checkpoint)
    with ExitStack() as files:
        slices = [tensor_slice(checkpoint.shards, name, files) for name in names]
        first, second = (tuple(part.get_shape()) for part in slices)
        if first != second or not first:
            return False
        width = max(1, torch.Size(first[1:]).numel())
        step = max(1, _CHUNK_BYTES // (4 * width))  # rows, counted as float32
        for start in range(0, first[0], step):
            rows = [part[start : start + step] for part in slices]
            # torch.equal needs tensors of one dtype.
            if rows[0].dtype != rows[1].dtype:
                rows = [part.float() for part in rows]
            if not torch.equal(*rows):
                return False
    return True


def tensor_slice(shards: tuple[Path, ...], name: str, files: ExitStack) -> Any:
    """Open a tensor of the shards without reading any rows."""
    for shard in shards:
        files.enter_context(reading(shard))
        file = files.enter_context(safe_open(shard, framework="pt"))
        if name in file.keys():  # noqa: SIM118
            return file.get_slice(name)
    raise KeyError(name)
