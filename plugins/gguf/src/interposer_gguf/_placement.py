"""The checkpoint tensors that each tensor of a GGUF file is converted to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._architecture import Architecture
from interposer_gguf._block_formats import FORMATS
from interposer_gguf._entries import (
    Change,
    Entry,
    JoinedTensors,
    Microscaled,
    PerExpert,
    SingleTensor,
    SplitTensor,
)
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

# Ends of the names of matrices that stay in blocks.
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
# Ends of the names of exceptions, which models multiply in wider floats.
_WIDE = (".weights_proj.weight",)
_FACTORS = (ROPE_FACTORS, *LONG_FACTORS.values())
_GATE, _UP, _DOWN = (f"ffn_{name}_exps.weight" for name in ("gate", "up", "down"))


def entries_of(
    file: GGUFFile, architecture: Architecture, config: Mapping[str, Any]
) -> tuple[Entry, ...]:
    """Return the conversion of every tensor of a file, in the order of the file.

    Raises:
        CheckpointError: the counterpart of a tensor is missing, or a shape does not fit the name.
        UnsupportedModelError: no supported model has a tensor of this name.
    """
    return tuple(_CheckpointEntries(file, architecture, config).entries())


class _CheckpointEntries:
    def __init__(
        self, file: GGUFFile, architecture: Architecture, config: Mapping[str, Any]
    ) -> None:
        self.file, self.architecture, self.config = file, architecture, config
        blocks = int(config["num_hidden_layers"])
        self.tensors = {
            name: tensor
            for name, tensor in file.tensors.items()
            # MTP blocks follow the decoder blocks and are not loaded.
            if name not in _FACTORS and (block_of(name) or 0) < blocks
        }

    def entries(self) -> Iterator[Entry]:
        seconds = {second for second, _ in self.architecture.joins.values()}
        for name, tensor in self.tensors.items():
            part = part_of(name)
            if part in self.architecture.splits:
                prefix = f"{self.architecture.block_prefix}.{block_of(name)}."
                yield SplitTensor(
                    self.file, tensor, prefix, self.config, self.architecture.splits[part]
                )
                continue
            name_in_checkpoint = self._checkpoint_name(name)
            if self._is_mxfp4(name):
                # The gate's entry includes the up projection.
                if part != _UP:
                    yield self._microscaled(name)
            elif part in self.architecture.joins:
                second, join = self.architecture.joins[part]
                yield JoinedTensors(
                    self.file, tensor, name_in_checkpoint, self._companion(name, second), join
                )
            elif part in seconds:
                # The other tensor's entry includes this one. Only check that the other exists.
                self._companion(
                    name, next(f for f, j in self.architecture.joins.items() if j[0] == part)
                )
            elif "{}" in name_in_checkpoint:
                yield self._per_expert(tensor, name_in_checkpoint)
            else:
                yield self._single(tensor, name_in_checkpoint, part)

    def _checkpoint_name(self, stored: str) -> str:
        name = hugging_face_name(stored, self.architecture)
        if name is None:
            raise UnsupportedModelError(
                self.file.path,
                f"holds the tensor {stored[:100]!r}, which no supported model has",
            )
        return name

    def _companion(self, stored: str, companion: str) -> StoredTensor:
        """Return the tensor to join or interleave with the tensor ``stored``."""
        name = f"{stored.removesuffix(part_of(stored))}{companion}"
        if name not in self.tensors:
            raise CheckpointError(self.file.path, f"holds {stored!r} without {name!r}")
        first, second = (self.tensors[tensor_name].shape for tensor_name in (stored, name))
        if len(first) != len(second) or len(first) < 2 or first[0] != second[0]:
            raise CheckpointError(
                self.file.path,
                f"stores {stored!r} and {name!r} with the shapes {first} and {second}, must have "
                "equally many matrices",
            )
        return self.tensors[name]

    def _is_mxfp4(self, stored: str) -> bool:
        """Return whether the block's expert matrices are all in MXFP4, and so keep the format."""
        if not self.architecture.interleaved_experts or part_of(stored) not in (_GATE, _UP, _DOWN):
            return False
        block = stored.removesuffix(part_of(stored))
        matrices = (self.tensors.get(f"{block}{part}") for part in (_GATE, _UP, _DOWN))
        return all(matrix is not None and matrix.stored_as == MXFP4.name for matrix in matrices)

    def _microscaled(self, stored: str) -> Entry:
        tensor = self.tensors[stored]
        self._check_expert_matrices(tensor)
        architecture = self.architecture
        name = f"{architecture.block_prefix}.{block_of(stored)}.{architecture.interleaved_experts}"
        if part_of(stored) == _DOWN:
            return Microscaled(self.file, tensor, f"{name}.down_proj", None)
        second = self._companion(stored, _UP)
        return Microscaled(self.file, tensor, f"{name}.gate_up_proj", second)

    def _per_expert(self, tensor: StoredTensor, name: str) -> Entry:
        self._check_expert_matrices(tensor)
        return PerExpert(self.file, tensor, name)

    def _check_expert_matrices(self, tensor: StoredTensor) -> None:
        if len(tensor.shape) != 3:
            raise CheckpointError(
                self.file.path,
                f"stores {tensor.name!r} with the shape {tensor.shape}, must be one matrix per "
                "expert",
            )

    def _single(self, tensor: StoredTensor, name: str, part: str) -> Entry:
        conversion = self.architecture.conversions.get(part)
        is_matrix = tensor.stored_as in FORMATS and len(tensor.shape) == 2
        stays_in_blocks = is_matrix and name.endswith(_IN_BLOCKS) and not name.endswith(_WIDE)
        if conversion is not None:
            stays_in_blocks = stays_in_blocks and conversion.keeps(
                self.config, FORMATS[tensor.stored_as].size
            )
            change: Change = partial(_converted, conversion.function, self.config)
        elif self.architecture.permuted and _module(name) in QUERY_AND_KEY:
            change = partial(_unpermute, self._heads(tensor, name))
        else:
            change = partial(_to_checkpoint_values, self.architecture, name, stays_in_blocks)
        return SingleTensor(self.file, tensor, name, stays_in_blocks, change)

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


def _converted(function: Any, config: Mapping[str, Any], values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = function(values, config)
    return result


def _unpermute(heads: int, values: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of queries or keys from Llama files to the Hugging Face order.

    In files of Llama, the two halves of a head that RoPE rotates together alternate: row 2 i + h of
    a head is row i of half h.
    """
    ordered: torch.Tensor = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return ordered


def _to_checkpoint_values(
    architecture: Architecture, name: str, stays_in_blocks: bool, values: torch.Tensor
) -> torch.Tensor:
    """Convert values to the checkpoint's: subtract the norm offset, transpose, add a dimension."""
    if (
        architecture.norm_offset
        and name.endswith("norm.weight")
        and not name.endswith(architecture.norms_without_offset)
    ):
        return values - architecture.norm_offset
    if values.ndim == 1 and name.endswith(architecture.row_vectors):
        return values[None]
    if (
        architecture.transposed
        and not stays_in_blocks
        and name.startswith(architecture.block_prefix)
        and values.ndim == 2
    ):
        return values.T.contiguous()
    return values
