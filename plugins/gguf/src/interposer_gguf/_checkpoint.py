"""A GGUF file as a checkpoint: config, tensors by their names in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from interposer import CheckpointFile
from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._architecture import Architecture, Join
from interposer_gguf._architectures import architecture_of
from interposer_gguf._block_formats import FORMATS
from interposer_gguf._decoder_settings import decoder_config
from interposer_gguf._file_format import GGUFFile, StoredTensor
from interposer_gguf._settings import Settings
from interposer_gguf._tensor_names import (
    LONG_FACTORS,
    QUERY_AND_KEY,
    ROPE_FACTORS,
    block_of,
    hugging_face_name,
)
from interposer_gguf._tokenizer import end_tokens, tokenizer_json, tokenizer_settings

# Ends of the names of matrices that are held as they are stored.
_IN_BLOCKS = tuple(
    f"{name}.weight"
    for name in ("_proj", "lm_head", "embed_tokens", ".c_attn", ".c_fc", ".wte", ".wpe")
)
_FACTORS = (ROPE_FACTORS, *LONG_FACTORS.values())


class GGUFCheckpoint(CheckpointFile):
    """A model of one of ``ARCHITECTURES`` in one GGUF file.

    Matrices of linear layers and experts, the embedding and the output stay in blocks, for the
    scheme ``gguf``. Other tensors in blocks are dequantized while they are read.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.settings = Settings(file)
        config = decoder_config(file, self.settings)
        self.form = architecture_of(self.settings)
        blocks = int(config["num_hidden_layers"])
        stored_names = [
            name
            for name in file.tensors
            # Blocks behind the others predict further tokens.
            if name not in _FACTORS and (block_of(name) or 0) < blocks
        ]
        self._names = {name: _name(file, name, self.form) for name in stored_names}
        self._joined = dict(_joined(file, self._names, self.form))
        self._seconds = {second for second, _ in self._joined.values()}
        in_blocks = {
            parameter.rpartition(".")[0]: file.tensors[stored].stored_as
            for stored, name in self._names.items()
            if _stays_in_blocks(file.tensors[stored], name)
            for parameter in self._parameters(stored)
        }
        if in_blocks:
            config["quantization_config"] = {"quant_method": "gguf", "tensors": in_blocks}
        config["eos_token_id"] = end_tokens(self.settings)
        super().__init__(file.path, config, sum(self._size(name) for name in self._names))

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Return the model in the file at ``path``, of which no weight is read yet.

        Raises:
            CheckpointError: it is no GGUF file, or contradicts itself.
            UnsupportedModelError: a tensor or the architecture is none of those that are read.
        """
        return cls(GGUFFile.open(path))

    def names(self) -> frozenset[str]:
        """Return the names of all tensors that ``stream`` yields."""
        return frozenset(name for stored in self._names for name in self._parameters(stored))

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in the order of the file, those of experts one by one.

        One that stays in blocks has the name of their format in place of ``weight``.

        Raises: CheckpointError: the file became shorter since it was opened.
        """
        for stored, name in self._names.items():
            tensor = self.file.tensors[stored]
            if stored in self._seconds:
                continue
            if stored in self._joined:
                second, join = self._joined[stored]
                yield name, join(self._floats(stored), self._floats(second))
                continue
            values = self._in_order(name, self.file.read(tensor))
            if _is_of_experts(name):
                yield from zip(self._parameters(stored), values, strict=True)
                continue
            if not _stays_in_blocks(tensor, name):
                values = _floats(tensor, values)
            (parameter,) = self._parameters(stored)
            yield parameter, self._as_trained(tensor, name, values)

    def tokenizer(self) -> str:
        """Return the tokenizer of the file as the contents of a tokenizer.json.

        Raises:
            CheckpointError: there is none, or it contradicts itself.
            UnsupportedModelError: its kind is not read.
        """
        return tokenizer_json(self.settings, int(self.config["vocab_size"]))

    def tokenizer_settings(self) -> dict[str, Any]:
        """Return the special tokens of the file, and its chat template.

        Raises: CheckpointError: one of them is none of its tokens.
        """
        return tokenizer_settings(self.settings, int(self.config["vocab_size"]))

    def _parameters(self, stored: str) -> tuple[str, ...]:
        """Return the names under which a tensor is yielded, one for each expert if it is theirs."""
        tensor, name = self.file.tensors[stored], self._names[stored]
        if _stays_in_blocks(tensor, name):
            name = f"{name.removesuffix('.weight')}.{tensor.stored_as}"
        if _is_of_experts(name):
            return tuple(name.format(expert) for expert in range(tensor.shape[0]))
        return (name,)

    def _floats(self, stored: str) -> torch.Tensor:
        """Read numbers, of blocks those that they stand for."""
        tensor = self.file.tensors[stored]
        return _floats(tensor, self.file.read(tensor))

    def _size(self, stored: str) -> int:
        """Return the bytes of a tensor as it is yielded."""
        tensor, name = self.file.tensors[stored], self._names[stored]
        if not tensor.in_blocks or _stays_in_blocks(tensor, name):
            return tensor.num_bytes
        layout = FORMATS[tensor.stored_as]
        return layout.row_numbers(tensor.num_bytes) * torch.float32.itemsize

    def _as_trained(self, tensor: StoredTensor, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return numbers as Hugging Face checkpoints have them."""
        if self.form.norm_offset and name.endswith("norm.weight"):
            return values - self.form.norm_offset
        if values.ndim == 1 and name.endswith(self.form.rows):
            return values[None]
        in_block = name.startswith(self.form.blocks)
        if self.form.transposed and in_block and values.ndim == 2:
            # What stays in blocks is read as it is.
            return values if _stays_in_blocks(tensor, name) else values.T.contiguous()
        return values

    def _in_order(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor with its outputs in the order of Hugging Face checkpoints.

        Llama's query and key are stored so that the two halves of a head that are rotated together
        alternate: row 2 i + h of a head is row i of half h.
        """
        module = name.rpartition(".")[0].partition("layers.")[2].partition(".")[2]
        if not self.form.permuted or module not in QUERY_AND_KEY:
            return values
        key = "num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"
        heads: Any = self.config[key]
        if heads < 1 or values.shape[0] % (2 * heads):
            raise UnsupportedModelError(
                self.path, f"has {values.shape[0]} outputs of {name!r}, not pairs of {heads} heads"
            )
        ordered: torch.Tensor = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return ordered


def _name(file: GGUFFile, stored: str, form: Architecture) -> str:
    name = hugging_face_name(stored, form)
    if name is None:
        raise UnsupportedModelError(
            file.path, f"holds the tensor {stored[:100]!r}, which no model that is read has"
        )
    shape = file.tensors[stored].shape
    if _is_of_experts(name) and len(shape) != 3:
        raise CheckpointError(
            file.path, f"stores {stored!r} with the shape {shape}, must be one matrix per expert"
        )
    return name


def _joined(
    file: GGUFFile, names: Mapping[str, str], form: Architecture
) -> Iterator[tuple[str, tuple[str, Join]]]:
    """Yield names of tensors that are one with another, and with which and how."""
    for stored in names:
        for first, (second, join) in form.joined.items():
            if stored.endswith(f".{first}.weight"):
                other = f"{stored.removesuffix(f'{first}.weight')}{second}.weight"
                if other not in names:
                    raise CheckpointError(file.path, f"holds {stored!r} without {other!r}")
                shapes = [file.tensors[name].shape for name in (stored, other)]
                if any(len(shape) != 3 for shape in shapes) or shapes[0][0] != shapes[1][0]:
                    raise CheckpointError(
                        file.path,
                        f"stores {stored!r} and {other!r} with the shapes {shapes[0]} and "
                        f"{shapes[1]}, must be as many matrices",
                    )
                yield stored, (other, join)


def _stays_in_blocks(tensor: StoredTensor, name: str) -> bool:
    """Say whether a tensor is stored in blocks, for a layer that takes them."""
    if not tensor.in_blocks:
        return False
    return _is_of_experts(name) or (len(tensor.shape) == 2 and name.endswith(_IN_BLOCKS))


def _is_of_experts(name: str) -> bool:
    """Say whether a name stands for one of each expert."""
    return "{}" in name


def _floats(tensor: StoredTensor, values: torch.Tensor) -> torch.Tensor:
    """Return numbers, of blocks those that they stand for."""
    if not tensor.in_blocks:
        return values
    return FORMATS[tensor.stored_as].dequantized(values, torch.float32)
