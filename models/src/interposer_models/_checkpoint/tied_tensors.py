"""Tied tensors that a checkpoint stores more than once, and whether they are equal."""

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
    """Return settings with a head of its own if the checkpoint stores another one than the table.

    transformers keeps such a head as well, whatever ``tie_word_embeddings`` says.
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
    """Refuse a checkpoint that stores different tensors where the model has one.

    Raises: CheckpointError: two of them differ.
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
    """Return the name that the checkpoint has for each tensor, by the name in the model.

    Empty where weights are not here yet, or a plugin reads them.
    """
    if not isinstance(checkpoint, Checkpoint):
        return {}
    names = checkpoint.names()
    # A decoder that was saved without its head has names without that of the decoder.
    bare = {f"{decoder}.{name}": name for name in names}
    return {**bare, **{renamed(name) or name: name for name in names}}


def _are_equal(checkpoint: Checkpoint | CheckpointFile, *names: str) -> bool:
    """Compare two tensors of a checkpoint, some rows at a time."""
    assert isinstance(checkpoint, Checkpoint)
    with ExitStack() as opened:
        slices = [tensor_slice(checkpoint.shards, name, opened) for name in names]
        first, second = (tuple(part.get_shape()) for part in slices)
        if first != second or not first:
            return False
        width = max(1, torch.Size(first[1:]).numel())
        step = max(1, _CHUNK_BYTES // (4 * width))
        for start in range(0, first[0], step):
            rows = [part[start : start + step] for part in slices]
            if rows[0].dtype != rows[1].dtype:
                rows = [part.float() for part in rows]
            if not torch.equal(*rows):
                return False
    return True


def tensor_slice(shards: tuple[Path, ...], name: str, opened: ExitStack) -> Any:
    """Return a tensor of the shards, no row of which is read yet."""
    for shard in shards:
        opened.enter_context(reading(shard))
        file = opened.enter_context(safe_open(shard, framework="pt"))
        if name in file.keys():  # noqa: SIM118
            return file.get_slice(name)
    raise KeyError(name)
