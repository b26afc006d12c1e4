"""Checks whether tied tensors that a checkpoint stores more than once are equal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from interposer import CausalModel, CheckpointFile, ModelFamily, PluggableLayer
from interposer.errors import CheckpointError
from interposer_models._checkpoint.checkpoint import Checkpoint, reading
from interposer_models._checkpoint.tensor_places import places_of
from interposer_models._decoder.settings import DecoderSettings

_CHUNK_BYTES = 2**24


def untied(
    decoder: ModelFamily, checkpoint: Checkpoint | CheckpointFile, notes: list[str]
) -> ModelFamily:
    """Return settings without tied embeddings if the checkpoint stores a head that differs.

    transformers keeps such a head as well, regardless of ``tie_word_embeddings``.

    Args:
        notes: receives a note if the settings change.
    """
    if not isinstance(decoder, DecoderSettings) or not decoder.tie_word_embeddings:
        return decoder
    frame = decoder.frame
    table, head = f"{frame.decoder}.{frame.embedding}.weight", f"{frame.head}.weight"
    stored = stored_names(checkpoint, decoder.renamed, frame.decoder)
    if not {table, head} <= stored.keys() or _are_equal(checkpoint, stored[table], stored[head]):
        return decoder
    notes.append(
        f"config.json says tie_word_embeddings, but {stored[head]!r} of the checkpoint differs "
        f"from {stored[table]!r}: the stored head is used"
    )
    return decoder.model_copy(update={"tie_word_embeddings": False})


def check_tied(checkpoint: Checkpoint | CheckpointFile, model: CausalModel) -> None:
    """Refuse a checkpoint that stores different tensors for one tensor of the model.

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
    """Return the checkpoint's name of each tensor, by its name in the model.

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
