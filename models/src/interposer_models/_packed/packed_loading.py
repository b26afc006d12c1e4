"""Weights of a plan: mapped from a packed file, or read from the checkpoint and packed.

The one seam between loading and packed files is ``load_weights``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from interposer import CheckpointFile
from interposer.errors import ConfigError
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.files import with_weights
from interposer_models._checkpoint.layer_group import LayerGroup, State
from interposer_models._checkpoint.weights import Keep, Moves, Progress, Weights
from interposer_models._packed.group_states import GroupData, group_states, keep_states
from interposer_models._packed.layer_states import UnpackableError
from interposer_models._packed.packed_file import (
    BeingWrittenError,
    Facts,
    MappedMemory,
    PackedFile,
    PackedFileError,
)
from interposer_models._packed.packed_key import judge_layouts, packed_key
from interposer_models._packed.packed_writer import PackedWriter
from interposer_models._packed.shelf import LEAST_BYTES, Shelf
from interposer_models._plan import Plan
from interposer_ops.devices import host_memory

_PAUSE_SECONDS = 0.05
_DIVIDED = "each rank holds shares of its own, and files hold whole models"
_log = logging.getLogger("interposer")


def load_weights(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> None:
    """Fill the model of a plan, and note where from.

    Raises:
        CheckpointError: as ``Weights.load``.
        ConfigError: ``packed`` is ``"on"``, and no packed weights can be used.
    """
    wanted = planned.resolver.config.packed
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(num_bytes)

    if wanted == "off":
        read(planned, checkpoint, weights, progress)
        return
    divided = planned.resolver.ranks is not None
    while True:
        try:
            refused = _DIVIDED if divided else _mapped(planned, checkpoint, weights, advance)
        except BeingWrittenError as error:
            if wanted == "on":
                time.sleep(_PAUSE_SECONDS)
                continue
            refused = str(error)
        break
    if refused is None:
        return
    if wanted == "on":
        raise ConfigError(f"packed='on' was asked for, but {refused}")
    if refused:
        _tell(planned, f"packed weights: none, {refused}")
    progress(-done)  # it begins again
    read(planned, checkpoint, weights, progress)


def read(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
    keep: Keep | None = None,
    copies: bool = True,
) -> None:
    """Read the weights of a checkpoint, in the manner of ``Weights.load``.

    Args:
        copies: ``keep`` copies what it is told.
    """
    tensors = _tensors(planned, checkpoint, weights)
    # Files of plugins may lie in memory that cannot be written.
    borrows = copies and isinstance(checkpoint, Checkpoint)
    weights.load(tensors, checkpoint.path, progress, checkpoint.names(), keep, borrows)


def relocate(planned: Plan, weights: Weights, moves: Moves) -> tuple[str, ...]:
    """Read the experts that this rank is to hold, in the manner of ``Weights.relocate``."""
    checkpoint = with_weights(planned.checkpoint)
    tensors = _tensors(planned, checkpoint, weights)
    return weights.relocate(moves, tensors, checkpoint.names(), checkpoint.path)


def _tensors(
    planned: Plan, checkpoint: Checkpoint | CheckpointFile, weights: Weights
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the tensors of a checkpoint, as the scheme has them."""
    scheme, stored = planned.resolver.scheme, checkpoint.stream()
    return stored if scheme is None else scheme.restored(stored, weights)


def pack_into(
    writer: PackedWriter,
    shelf: Shelf,
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> Facts:
    """Read the weights of a checkpoint and hold them in a file alone.

    Returns: what the file is to say of itself.
    Raises:
        CheckpointError: as ``Weights.load``.
        PackedFileError: the file cannot be written.
        UnpackableError: a layer holds what no file can.
    """
    states: GroupData = {}

    def keep(number: int, group: LayerGroup) -> None:
        keep_states(states, number, group, writer.keep)

    with host_memory.placed(writer.place):
        read(planned, checkpoint, weights, progress, keep)
    return Facts(shelf.key.asked, shelf.key.made_by, states, writer.memories)


def packed_file(
    planned: Plan, checkpoint: Checkpoint | CheckpointFile, weights: Weights, progress: Progress
) -> PackedFile:
    """Return the packed weights of a plan, written and published before if there are none.

    The model is on the meta device, as it was.

    Raises:
        CheckpointError: as ``Weights.load``.
        PackedFileError: the model has no packed form, or it cannot be written.
        UnpackableError: a layer holds what no file can.
    """
    if not (verdict := judge_layouts(planned)):
        raise PackedFileError(verdict.reason)
    key = packed_key(planned, checkpoint)
    shelf = Shelf.of(key, checkpoint, planned.resolver.config)
    if (found := shelf.find()) is not None:
        progress(checkpoint.num_bytes)
        return found
    if refused := shelf.judge_room(checkpoint.num_bytes):
        raise PackedFileError(refused)
    while True:
        try:
            writer = shelf.writer(shelf.kept)
            break
        except BeingWrittenError:
            time.sleep(_PAUSE_SECONDS)
    try:
        if (found := shelf.find()) is None:  # another process may have written it meanwhile
            facts = pack_into(writer, shelf, planned, checkpoint, weights, progress)
            writer.publish(facts)
            shelf.evict(writer.path)
            found = PackedFile(writer.path, facts)
    finally:
        writer.close()
    return found


def _mapped(
    planned: Plan, checkpoint: Checkpoint | CheckpointFile, weights: Weights, progress: Progress
) -> str | None:
    """Fill the model with what is mapped; return why that cannot be, None where it was.

    An empty text says no more than that the checkpoint is small.

    Raises: BeingWrittenError: another process packs it now.
    """
    if not (verdict := judge_layouts(planned)):
        return verdict.reason
    config = planned.resolver.config
    shelf = Shelf.of(packed_key(planned, checkpoint), checkpoint, config)
    found = shelf.find()
    if found is not None:
        try:
            _restore(weights, found.facts, found.memory())
        except PackedFileError as error:
            shelf.refused.append(f"{found.path}: {error}")
            found = None
    for reason in shelf.refused:
        _tell(planned, f"packed weights: not used, {reason}")
    num_bytes = checkpoint.num_bytes
    if found is not None:
        _note(planned, found.facts, found.path)
        progress(num_bytes)
        return None
    if num_bytes < LEAST_BYTES and config.packed == "auto":
        return ""
    if refused := shelf.judge_room(num_bytes):
        return refused
    writer: PackedWriter | None = None
    try:
        writer = shelf.writer(shelf.kept)
        facts = pack_into(writer, shelf, planned, checkpoint, weights, progress)
        _restore(weights, facts, writer.memory())
    except BaseException as error:
        if writer is not None:
            writer.close()
        refusals = PackedFileError | UnpackableError
        if isinstance(error, BeingWrittenError) or not isinstance(error, refusals):
            raise
        return str(error)
    _note(planned, facts, writer.path)
    shelf.publish_soon(writer, facts)
    return None


def _restore(weights: Weights, facts: Facts, memory: MappedMemory) -> None:
    def states_of(number: int, group: LayerGroup) -> Iterable[State]:
        return group_states(facts.states, number, group, memory.__getitem__)

    try:
        weights.restore(states_of)
    except (KeyError, ValueError, TypeError) as error:
        raise PackedFileError(f"it does not fit the model: {error}") from error


def _note(planned: Plan, facts: Facts, path: Path) -> None:
    num_bytes = sum(size for _, size in facts.memories)
    planned.resolver.notes.append(f"packed weights: {num_bytes >> 20} MiB, mapped from {path}")


def _tell(planned: Plan, note: str) -> None:
    planned.resolver.notes.append(note)
    _log.warning("%s: %s", planned.path, note)
