"""The ways to fill the model of a plan: the steps that they share, and the turn to the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from interposer import CheckpointFile
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.files import with_weights
from interposer_models._checkpoint.layer_group import LayerGroup, State
from interposer_models._checkpoint.weights import Keep, Moves, Progress, Weights
from interposer_models._packed.group_states import GroupData, group_states, keep_states
from interposer_models._packed.layer_states import UnpackableError
from interposer_models._packed.packed_file import (
    BeingWrittenError,
    Facts,
    PackedFile,
    PackedFileError,
)
from interposer_models._packed.packed_key import judge_layouts, packed_key
from interposer_models._packed.packed_writer import PackedWriter
from interposer_models._packed.shelf import Shelf
from interposer_models._plan import Plan
from interposer_ops.devices import host_memory

PAUSE_SECONDS = 0.05
REFUSALS: tuple[type[Exception], ...] = (PackedFileError, UnpackableError)

MemoryOf = Callable[[int], torch.Tensor]
"""Returns the memory of a number, uint8."""


def attempted(
    way: Callable[[Progress], None],
    progress: Progress,
    refusals: tuple[type[Exception], ...] = REFUSALS,
) -> Exception | None:
    """Fill a model one way, and return why that cannot be; None where it was.

    What was told of progress is taken back with a refusal, as the next way begins again.
    """
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(num_bytes)

    try:
        way(advance)
    except refusals as error:
        progress(-done)
        return error
    return None


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


def states_of(
    states: GroupData, number: int, group: LayerGroup, memory_of: MemoryOf
) -> list[State]:
    """Return the states of a group over memories.

    Raises: PackedFileError: they are of another model.
    """
    try:
        return group_states(states, number, group, memory_of)
    except (KeyError, ValueError, TypeError) as error:
        raise PackedFileError(f"it does not fit the model: {error}") from error


def restore(weights: Weights, states: GroupData, memory_of: MemoryOf) -> None:
    """Let all layers hold states over memories.

    Raises: PackedFileError: they are of another model.
    """

    def restored(number: int, group: LayerGroup) -> Iterable[State]:
        return states_of(states, number, group, memory_of)

    weights.restore(restored)


def repeat_findings(weights: Weights, facts: Facts) -> None:
    """Log what the check of weights found when a file was packed, unless the check is off now."""
    if weights.check is not None and weights.check.policy != "off":
        weights.check.add(facts.non_finite or ())


def shelf_of(planned: Plan, checkpoint: Checkpoint | CheckpointFile) -> Shelf:
    """Return the shelf for the packed weights of a plan.

    Raises: PackedFileError: they have no packed form.
    """
    if not (verdict := judge_layouts(planned)):
        raise PackedFileError(verdict.reason)
    return Shelf.of(packed_key(planned, checkpoint), checkpoint, planned.resolver.config)


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
    check = weights.check
    findings = None if check is None or check.policy == "off" else check.findings
    asked, made_by = shelf.key.asked, shelf.key.made_by
    return Facts(asked, made_by, states, writer.memories, non_finite=findings)


def packed_file(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> PackedFile:
    """Return the packed weights of a plan, written and published before if there are none.

    The model is on the meta device, as it was.

    Args:
        sleep: waits for so many seconds while another process writes the file.
    Raises:
        CheckpointError: as ``Weights.load``.
        PackedFileError: the model has no packed form, or it cannot be written.
        UnpackableError: a layer holds what no file can.
    """
    shelf = shelf_of(planned, checkpoint)
    if (found := shelf.find()) is not None:
        repeat_findings(weights, found.facts)
        progress(checkpoint.num_bytes)
        return found
    if refused := shelf.judge_room(checkpoint.num_bytes):
        raise PackedFileError(refused)
    while True:
        try:
            writer = shelf.writer(shelf.kept)
            break
        except BeingWrittenError:
            sleep(PAUSE_SECONDS)
    try:
        if (found := shelf.find()) is None:  # another process may have written it meanwhile
            facts = pack_into(writer, shelf, planned, checkpoint, weights, progress)
            writer.publish(facts)
            shelf.evict(writer.path)
            found = PackedFile(writer.path, facts)
    finally:
        writer.close()
    return found
