"""The contract of a model stored in another form than a Hugging Face directory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor


class CheckpointFile(ABC):
    """A model file of another format, presented like a Hugging Face directory.

    Attributes:
        path: the file that was opened.
        config: the equivalent content of config.json, including ``quantization_config`` if weights
            are quantized; ``eos_token_id`` ends generations.
        num_bytes: bytes of all tensors that ``stream`` yields, for progress reports.
    """

    def __init__(self, path: Path, config: dict[str, Any], num_bytes: int) -> None:
        self.path = path
        self.config = config
        self.num_bytes = num_bytes

    @classmethod
    @abstractmethod
    def open(cls, path: Path) -> CheckpointFile:
        """Open the file at ``path`` without reading any weight.

        Raises: CheckpointError: the file has another format, is corrupt, or holds a model that this
            presentation cannot express.
        """

    def names(self) -> Collection[str] | None:
        """Return the names of all tensors that ``stream`` yields, or None if unknown.

        With known names, a layer without an optional tensor can be finalized before the end of the
        stream.

        Raises: CheckpointError: the file is corrupt.
        """
        return None

    @abstractmethod
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor once, with the name of the tensor's parameter.

        The name is the tensor's name in Hugging Face checkpoints of the architecture; for quantized
        weights, the name that the scheme's linear method registers.

        Raises: CheckpointError: the file is truncated, or holds a tensor that cannot be a weight.
        """

    @abstractmethod
    def tokenizer(self) -> str:
        """Return the equivalent content of tokenizer.json, as the tokenizers library reads it.

        Raises: CheckpointError: the file holds no tokenizer, or one that tokenizer.json cannot
            express.
        """

    def tokenizer_settings(self) -> dict[str, Any]:
        """Return the equivalent content of tokenizer_config.json, such as ``chat_template``."""
        return {}
