"""A GGUF file as a checkpoint: config, tensors by their names in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from interposer import CheckpointFile
from interposer_gguf._architectures import architecture_of
from interposer_gguf._decoder_settings import decoder_config
from interposer_gguf._end_tokens import end_tokens
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._placement import entries_of
from interposer_gguf._settings import Settings
from interposer_gguf._tokenizer import tokenizer_json, tokenizer_settings


class GGUFCheckpoint(CheckpointFile):
    """A model of one of ``ARCHITECTURES`` in one GGUF file.

    Matrices of linear layers and experts, the embedding and the output stay in blocks, for the
    scheme ``gguf``. Other tensors in blocks are dequantized while they are read.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.settings = Settings(file)
        config = decoder_config(file, self.settings)
        self.entries = entries_of(file, architecture_of(self.settings), config)
        in_blocks: Mapping[str, str] = {
            layer: stored_as for entry in self.entries for layer, stored_as in entry.held.items()
        }
        if in_blocks:
            config["quantization_config"] = {"quant_method": "gguf", "tensors": in_blocks}
        config["eos_token_id"] = end_tokens(self.settings)
        super().__init__(file.path, config, sum(entry.num_bytes for entry in self.entries))

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
        return frozenset(name for entry in self.entries for name in entry.names)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in the order of the file, those of experts one by one.

        One that stays in blocks has the name of their format in place of ``weight``.

        Raises: CheckpointError: the file became shorter since it was opened.
        """
        for entry in self.entries:
            yield from entry.tensors()

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
