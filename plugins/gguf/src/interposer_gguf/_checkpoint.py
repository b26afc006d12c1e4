"""A GGUF file as a checkpoint: config, tokenizer, and tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from interposer import CheckpointFile
from interposer_gguf._architectures import architecture_of
from interposer_gguf._decoder_config import decoder_config
from interposer_gguf._end_tokens import end_tokens
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader
from interposer_gguf._placement import entries_of
from interposer_gguf._tokenizer import tokenizer_json, tokenizer_settings


class GGUFCheckpoint(CheckpointFile):
    """A model in one GGUF file, of one of the supported ``ARCHITECTURES``.

    The embedding, the LM head and the matrices of linear layers and experts stay in blocks, for the
    scheme ``gguf``. Other tensors in blocks are dequantized on loading.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.metadata = MetadataReader(file)
        config = decoder_config(file, self.metadata)
        self.entries = entries_of(file, architecture_of(self.metadata), config)
        in_blocks: Mapping[str, str] = {
            layer: stored_as
            for entry in self.entries
            for layer, stored_as in entry.formats_by_layer.items()
        }
        # A file of floats only is loaded without a quantization scheme.
        if in_blocks:
            config["quantization_config"] = {"quant_method": "gguf", "tensors": in_blocks}
        config["eos_token_id"] = end_tokens(self.metadata)
        super().__init__(file.path, config, sum(entry.num_bytes for entry in self.entries))

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Open the model in the file at ``path`` without reading weights.

        Raises:
            CheckpointError: the file is no GGUF file, or contradicts itself.
            UnsupportedModelError: a tensor or the architecture is not supported.
        """
        return cls(GGUFFile.open(path))

    def names(self) -> frozenset[str]:
        """Return the names of all tensors that ``stream`` yields."""
        return frozenset(name for entry in self.entries for name in entry.names)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in the order of the file, with one tensor per expert.

        The name of a tensor that stays in blocks ends with the block format instead of ``weight``.

        Raises: CheckpointError: the file was truncated after opening.
        """
        for entry in self.entries:
            yield from entry.tensors()

    def tokenizer(self) -> str:
        """Return the tokenizer of the file as the contents of a tokenizer.json.

        Raises:
            CheckpointError: the file has no tokenizer, or one that contradicts itself.
            UnsupportedModelError: the kind of tokenizer is not supported.
        """
        return tokenizer_json(self.metadata, int(self.config["vocab_size"]))

    def tokenizer_settings(self) -> dict[str, Any]:
        """Return the special tokens and the chat template of the file.

        Raises: CheckpointError: the id of a special token is not in the vocabulary.
        """
        return tokenizer_settings(self.metadata, int(self.config["vocab_size"]))
