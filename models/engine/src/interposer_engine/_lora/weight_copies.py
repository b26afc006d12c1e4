"""Check of embedding and LM head copies that PEFT saves next to LoRA matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from interposer import CheckpointFile, PluggableLayer
from interposer.errors import CheckpointError
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.opening import download_weights
from interposer_engine._checkpoint.tensors import places_of, stored_names, tensor_slice

_MEND = (
    "save it by save_pretrained(folder, save_embedding_layers=False) of PEFT, or merge the adapter "
    "by merge_and_unload()"
)


class BaseCopies:
    """Compares weights in an adapter's file with the base model's weights.

    Args:
        checkpoint: checkpoint of the base model; None if unknown.
    """

    def __init__(self, checkpoint: Checkpoint | CheckpointFile | None, model: nn.Module) -> None:
        self._checkpoint, self._model = checkpoint, model

    def check(self, file: Path, key: str, names: Iterator[str], copy: Tensor) -> None:
        """Refuse an adapter's copy of a weight that differs from the base model's weight.

        Args:
            key: name of the copy in ``file``.
            names: names that the module may have in the model.
        Raises: CheckpointError: the copy differs, or the base model cannot be compared.
        """
        base = self._base(names)
        if base is None:
            reason = f"holds {key!r}, a weight of the base model, which cannot be compared with it"
            raise CheckpointError(file, reason, _MEND)
        if base.shape != copy.shape:
            raise CheckpointError(
                file,
                f"holds {key!r} of the shape {list(copy.shape)}, that of the base model has "
                f"{list(base.shape)}: the vocabulary was resized",
                "merge the adapter by merge_and_unload() of PEFT, and load the merged model",
            )
        # The copy may be stored in another dtype than the base model.
        if not torch.equal(base.to(copy.dtype), copy):
            raise CheckpointError(
                file,
                f"holds {key!r}, which differs from the weight of the base model",
                "load the base model that it was trained for, or merge the adapter by "
                "merge_and_unload() of PEFT",
            )

    def _base(self, names: Iterator[str]) -> Tensor | None:
        """Return the base model's weight of a module; None if the checkpoint has none."""
        if not isinstance(self._checkpoint, Checkpoint):
            return None
        checkpoint = download_weights(self._checkpoint)
        assert isinstance(checkpoint, Checkpoint)
        renamed: Callable[[str], str | None] = getattr(self._model, "renamed", str)
        frame = getattr(getattr(self._model, "config", None), "frame", None)
        stored = stored_names(checkpoint, renamed, getattr(frame, "decoder", ""))
        layers = [layer for layer in self._model.modules() if isinstance(layer, PluggableLayer)]
        tied = places_of(layers)[1]
        # Of tied weights, the checkpoint may store either one.
        partners = {**tied, **{table: head for head, table in tied.items()}}
        for name in names:
            for weight in (f"{name}.weight", partners.get(f"{name}.weight")):
                if weight in stored:
                    with ExitStack() as files:
                        rows: Tensor = tensor_slice(checkpoint.shards, stored[weight], files)[:]
                        return rows
        return None
