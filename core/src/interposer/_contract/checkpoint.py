"""The contract of a model that is stored otherwise than as a Hugging Face directory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor


class CheckpointFile(ABC):
    """A model in a file of a format of its own, told in the words of a Hugging Face directory.

    Attributes:
        path: the file that was opened.
        config: what config.json would hold, ``quantization_config`` included where weights are
            quantized; ``eos_token_id`` ends generations.
        num_bytes: of all tensors that ``stream`` yields, to tell how far it has come.
    """

    def __init__(self, path: Path, config: dict[str, Any], num_bytes: int) -> None:
        self.path = path
        self.config = config
        self.num_bytes = num_bytes

    @classmethod
    @abstractmethod
    def open(cls, path: Path) -> CheckpointFile:
        """Return the file at ``path``, of which no weight is read yet.

        Raises: CheckpointError: it is no such file, corrupt, or of a model that cannot be told so.
        """

    def names(self) -> Collection[str] | None:
        """Return the names of all tensors that ``stream`` yields, None if they aren't known before.

        Where they are, no layer waits until the end for a tensor that is optional and not there.

        Raises: CheckpointError: the file is corrupt.
        """
        return None

    @abstractmethod
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor once, by the name of the parameter that it belongs to.

        That is the name in Hugging Face checkpoints of the architecture, and what the linear
        methods of the quantization scheme register.

        Raises: CheckpointError: the file ends early or holds what cannot be a weight.
        """

    @abstractmethod
    def tokenizer(self) -> str:
        """Return what tokenizer.json would hold, as the tokenizers library reads it.

        Raises: CheckpointError: the file holds no tokenizer, or one that cannot be told so.
        """

    def tokenizer_settings(self) -> dict[str, Any]:
        """Return what tokenizer_config.json would hold, such as ``chat_template``; here nothing."""
        return {}
