"""The entries of a Hugging Face checkpoint that the tensors of a file stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._architecture import Architecture
from interposer_gguf._block_formats import FORMATS
from interposer_gguf._entries import Apart, Change, Entry, Joined, Microscaled, PerExpert, Whole
from interposer_gguf._file_format import GGUFFile, StoredTensor
from interposer_gguf._microscaling import MXFP4
from interposer_gguf._tensor_names import (
    LONG_FACTORS,
    QUERY_AND_KEY,
    ROPE_FACTORS,
    block_of,
    hugging_face_name,
    part_of,
)

# Ends of the names of matrices that are held as they are stored.
# fmt: off
_IN_BLOCKS = tuple(
    f"{name}.weight"
    for name in (
        "_proj", "lm_head", "embed_tokens", ".c_attn", ".c_fc", ".wte", ".wpe", ".embeddings",
        ".in_proj_qkv", ".in_proj_z", ".in_proj_a", ".in_proj_b", ".w1", ".w2", ".w3",
        ".query_key_value", ".wq_b", ".wk", ".dense", ".dense_h_to_4h", ".dense_4h_to_h",
        ".embed_in", "embed_out", ".word_embeddings", ".embed_tokens_per_layer",
        ".per_layer_projection", ".per_layer_input_gate", ".per_layer_model_projection",
    )
)
# fmt: on
# Ends of the names of those among them that are computed with in wider floats.
_WIDE = (".weights_proj.weight",)
_FACTORS = (ROPE_FACTORS, *LONG_FACTORS.values())
_GATES, _ACTED_ON, _SECOND = (f"ffn_{name}_exps.weight" for name in ("gate", "up", "down"))


def entries_of(file: GGUFFile, form: Architecture, config: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Return what a checkpoint has in place of the tensors of a file, in the order of the file.

    Raises:
        CheckpointError: a tensor has no companion, or a shape that its name does not allow.
        UnsupportedModelError: a tensor is none of those that are read.
    """
    return tuple(_Placing(file, form, config).entries())


class _Placing:
    def __init__(self, file: GGUFFile, form: Architecture, config: Mapping[str, Any]) -> None:
        self.file, self.form, self.config = file, form, config
        blocks = int(config["num_hidden_layers"])
        self.tensors = {
            name: tensor
            for name, tensor in file.tensors.items()
            # Blocks behind the others predict further tokens.
            if name not in _FACTORS and (block_of(name) or 0) < blocks
        }

    def entries(self) -> Iterator[Entry]:
        seconds = {second for second, _ in self.form.joined.values()}
        for name, tensor in self.tensors.items():
            part = part_of(name)
            if part in self.form.divided:
                prefix = f"{self.form.blocks}.{block_of(name)}."
                yield Apart(self.file, tensor, prefix, self.config, self.form.divided[part])
                continue
            named = self._named(name)
            if self._is_microscaled(name):
                if part != _ACTED_ON:
                    yield self._microscaled(name)
            elif part in self.form.joined:
                second, join = self.form.joined[part]
                yield Joined(self.file, tensor, named, self._companion(name, second), join)
            elif part in seconds:
                self._companion(name, next(f for f, j in self.form.joined.items() if j[0] == part))
            elif "{}" in named:
                yield self._per_expert(tensor, named)
            else:
                yield self._whole(tensor, named, part)

    def _named(self, stored: str) -> str:
        name = hugging_face_name(stored, self.form)
        if name is None:
            raise UnsupportedModelError(
                self.file.path,
                f"holds the tensor {stored[:100]!r}, which no model that is read has",
            )
        return name

    def _companion(self, stored: str, other: str) -> StoredTensor:
        """Return the tensor that is one of a checkpoint together with another one."""
        name = f"{stored.removesuffix(part_of(stored))}{other}"
        if name not in self.tensors:
            raise CheckpointError(self.file.path, f"holds {stored!r} without {name!r}")
        first, second = (self.tensors[each].shape for each in (stored, name))
        if len(first) != len(second) or len(first) < 2 or first[0] != second[0]:
            raise CheckpointError(
                self.file.path,
                f"stores {stored!r} and {name!r} with the shapes {first} and {second}, must be as "
                "many matrices",
            )
        return self.tensors[name]

    def _is_microscaled(self, stored: str) -> bool:
        """Say whether the experts that a matrix belongs to stay in MXFP4, which all of them do."""
        if not self.form.alternating or part_of(stored) not in (_GATES, _ACTED_ON, _SECOND):
            return False
        block = stored.removesuffix(part_of(stored))
        matrices = (self.tensors.get(f"{block}{part}") for part in (_GATES, _ACTED_ON, _SECOND))
        return all(matrix is not None and matrix.stored_as == MXFP4.name for matrix in matrices)

    def _microscaled(self, stored: str) -> Entry:
        tensor = self.tensors[stored]
        self._check_of_experts(tensor)
        name = f"{self.form.blocks}.{block_of(stored)}.{self.form.alternating}"
        if part_of(stored) == _SECOND:
            return Microscaled(self.file, tensor, f"{name}.down_proj", None)
        second = self._companion(stored, _ACTED_ON)
        return Microscaled(self.file, tensor, f"{name}.gate_up_proj", second)

    def _per_expert(self, tensor: StoredTensor, name: str) -> Entry:
        self._check_of_experts(tensor)
        return PerExpert(self.file, tensor, name)

    def _check_of_experts(self, tensor: StoredTensor) -> None:
        if len(tensor.shape) != 3:
            raise CheckpointError(
                self.file.path,
                f"stores {tensor.name!r} with the shape {tensor.shape}, must be one matrix per "
                "expert",
            )

    def _whole(self, tensor: StoredTensor, name: str, part: str) -> Entry:
        restored = self.form.restored.get(part)
        is_matrix = tensor.stored_as in FORMATS and len(tensor.shape) == 2
        stays = is_matrix and name.endswith(_IN_BLOCKS) and not name.endswith(_WIDE)
        if restored is not None:
            stays = stays and restored.keeps(self.config, FORMATS[tensor.stored_as].size)
            change: Change = partial(_given, restored.function, self.config)
        elif self.form.permuted and _module(name) in QUERY_AND_KEY:
            change = partial(_unpermuted, self._heads(tensor, name))
        else:
            change = partial(_as_trained, self.form, name, stays)
        return Whole(self.file, tensor, name, stays, change)

    def _heads(self, tensor: StoredTensor, name: str) -> int:
        heads = int(self.config[QUERY_AND_KEY[_module(name)]])
        if heads < 1 or tensor.shape[0] % (2 * heads):
            raise UnsupportedModelError(
                self.file.path,
                f"has {tensor.shape[0]} outputs of {name!r}, not pairs of {heads} heads",
            )
        return heads


def _module(name: str) -> str:
    return name.rpartition(".")[0].partition("layers.")[2].partition(".")[2]


def _given(function: Any, config: Mapping[str, Any], values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = function(values, config)
    return result


def _unpermuted(heads: int, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its outputs in the order of Hugging Face checkpoints.

    Llama's query and key are stored so that the two halves of a head that are rotated together
    alternate: row 2 i + h of a head is row i of half h.
    """
    ordered: torch.Tensor = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return ordered


def _as_trained(form: Architecture, name: str, stays: bool, values: torch.Tensor) -> torch.Tensor:
    """Return numbers as Hugging Face checkpoints have them; what stays in blocks is left."""
    if form.norm_offset and name.endswith("norm.weight") and not name.endswith(form.plain):
        return values - form.norm_offset
    if values.ndim == 1 and name.endswith(form.rows):
        return values[None]
    if form.transposed and not stays and name.startswith(form.blocks) and values.ndim == 2:
        return values.T.contiguous()
    return values
