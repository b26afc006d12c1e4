"""Loads the weights of a plan by mapping a packed file, or by reading the checkpoint.

``load_weights`` is the only integration point between model loading and packed files. If one way to
load is refused, the next way is tried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from interposer import CheckpointFile
from interposer.errors import ConfigError
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.layers import LayerGroup, State
from interposer_engine._checkpoint.opening import download_weights
from interposer_engine._checkpoint.weights import Keep, Moves, Progress, Weights
from interposer_engine._packed.file import (
    BeingWrittenError,
    Facts,
    PackedFile,
    PackedFileError,
    PackedWriter,
    judge_layouts,
    packed_key,
)
from interposer_engine._packed.states import GroupData, UnpackableError, group_states, keep_states
from interposer_engine._packed.store import MIN_BYTES, PackedStore
from interposer_engine._plan import Plan
from interposer_ops.devices import host_memory

PAUSE_SECONDS = 0.05
REFUSALS: tuple[type[Exception], ...] = (PackedFileError, UnpackableError)

MemoryOf = Callable[[int], torch.Tensor]
"""Returns the memory of a number, as uint8."""

_log = logging.getLogger("interposer")


class _TooSmallError(PackedFileError):
    """The checkpoint is too small to be worth packing, which needs no note."""


class _RankedModelError(PackedFileError):
    """The model runs on several ranks, so packed weights are unavailable; a note says so."""


def load_weights(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Load a planned model's weights from packed weights, or from its checkpoint.

    Args:
        sleep: waits for a number of seconds while another process writes the file.
    Returns: notes on where the weights came from.
    Raises:
        CheckpointError: as ``Weights.load``.
        ConfigError: ``packed`` is ``"on"``, and no packed weights can be used.
    """
    setting = planned.resolver.config.packed
    notes: list[str] = []

    def mapped(advance: Progress) -> None:
        _map(planned, checkpoint, weights, advance, notes)

    if setting != "off":
        refusal = try_loading(mapped, progress)
        # With "auto", reading the checkpoint is faster than waiting for another process.
        while setting == "on" and isinstance(refusal, BeingWrittenError):
            sleep(PAUSE_SECONDS)
            refusal = try_loading(mapped, progress)
        if refusal is None:
            return notes
        if setting == "on":
            raise ConfigError(f"packed='on' was requested, but {refusal}") from refusal
        note = f"packed weights: none, {refusal}"
        if not isinstance(refusal, _TooSmallError):
            notes.append(note)
            if not isinstance(refusal, _RankedModelError):
                _log.warning("%s: %s", planned.path, note)
    read(planned, checkpoint, weights, progress)
    return notes


def _map(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
    notes: list[str],
) -> None:
    """Set the model's layers to mapped packed weights; without a file, pack the weights first.

    A thread publishes the new file.

    Args:
        notes: receives the files that were refused, even if no file can be used, and the file
            that is used.

    Raises:
        CheckpointError: as ``Weights.load``.
        BeingWrittenError: another process writes the file now.
        PackedFileError: the weights cannot be packed or mapped.
        UnpackableError: a layer holds a value that no file can store.
    """
    if planned.resolver.ranks is not None:
        raise _RankedModelError("each rank holds shards, and packed files hold whole models")
    packed_store = packed_store_of(planned, checkpoint)
    file = packed_store.find()
    if file is not None:
        try:
            restore(weights, file.facts.states, file.memory().__getitem__)
        except PackedFileError as error:
            packed_store.refusals.append(f"{file.path}: {error}")
            file = None
    for reason in packed_store.refusals:
        notes.append(f"packed weights: not used, {reason}")
        _log.warning("%s: %s", planned.path, notes[-1])
    num_bytes = checkpoint.num_bytes
    if file is not None:
        repeat_findings(weights, file.facts)
        notes.append(_mapped_note(file.facts, file.path))
        progress(num_bytes)
        return
    if num_bytes < MIN_BYTES and planned.resolver.config.packed == "auto":
        raise _TooSmallError(f"it has {num_bytes} bytes, fewer than {MIN_BYTES}")
    if refusal := packed_store.judge_space(num_bytes):
        raise PackedFileError(refusal)
    writer = packed_store.writer(packed_store.cache_folder)
    try:
        # The model uses the mapped file at once; a thread publishes it afterwards.
        facts = pack_into(writer, packed_store, planned, checkpoint, weights, progress)
        restore(weights, facts.states, writer.memory().__getitem__)
    except BaseException:
        writer.close()
        raise
    notes.append(_mapped_note(facts, writer.path))
    packed_store.publish_soon(writer, facts)


def _mapped_note(facts: Facts, path: Path) -> str:
    num_bytes = sum(size for _, size in facts.memories)
    return f"packed weights: {num_bytes >> 20} MiB, mapped from {path}"


def try_loading(
    load: Callable[[Progress], None],
    progress: Progress,
    refusals: tuple[type[Exception], ...] = REFUSALS,
) -> Exception | None:
    """Load a model by the function ``load``; return None, or the error by which ``load`` refused.

    A refusal reports the negative of the progress so far, as the next way starts from the
    beginning.
    """
    done_bytes = 0

    def advance(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress(num_bytes)

    try:
        load(advance)
    except refusals as error:
        progress(-done_bytes)
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
    """Read the weights of a checkpoint by ``Weights.load``.

    Args:
        copies: whether ``keep`` copies the tensors of each group.
    """
    tensors = _tensors(planned, checkpoint, weights)
    # Layers may write to borrowed tensors, and tensors of plugins may be read-only.
    can_borrow = copies and isinstance(checkpoint, Checkpoint)
    weights.load(tensors, checkpoint.path, progress, checkpoint.names(), keep, can_borrow)


def relocate(planned: Plan, weights: Weights, moves: Moves) -> tuple[str, ...]:
    """Read the weights of experts that move to this rank, through ``Weights.relocate``."""
    checkpoint = download_weights(planned.checkpoint)
    tensors = _tensors(planned, checkpoint, weights)
    return weights.relocate(moves, tensors, checkpoint.names(), checkpoint.path)


def _tensors(
    planned: Plan, checkpoint: Checkpoint | CheckpointFile, weights: Weights
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the tensors of a checkpoint, converted by the quantization scheme."""
    scheme, tensors = planned.resolver.scheme, checkpoint.stream()
    return tensors if scheme is None else scheme.restored(tensors, weights)


def states_of(
    states: GroupData, number: int, group: LayerGroup, memory_of: MemoryOf
) -> list[State]:
    """Return the packed states of a layer group, with tensors in storages from ``memory_of``.

    Raises: PackedFileError: the states belong to another model.
    """
    try:
        return group_states(states, number, group, memory_of)
    except (KeyError, ValueError, TypeError) as error:
        raise PackedFileError(f"it does not fit the model: {error}") from error


def restore(weights: Weights, states: GroupData, memory_of: MemoryOf) -> None:
    """Set all layers to packed states, with tensors in storages from ``memory_of``.

    Raises: PackedFileError: the states belong to another model.
    """

    def restored(number: int, group: LayerGroup) -> Iterable[State]:
        return states_of(states, number, group, memory_of)

    weights.restore(restored)


def repeat_findings(weights: Weights, facts: Facts) -> None:
    """Log what the weight check found during packing, unless the check is off now."""
    if weights.check is not None and weights.check.policy != "off":
        weights.check.add(facts.non_finite or ())


def packed_store_of(planned: Plan, checkpoint: Checkpoint | CheckpointFile) -> PackedStore:
    """Return the store that may hold the packed weights of a plan.

    Raises: PackedFileError: the weights have no packed form.
    """
    if not (verdict := judge_layouts(planned)):
        raise PackedFileError(verdict.reason)
    return PackedStore.of(packed_key(planned, checkpoint), checkpoint, planned.resolver.config)


def pack_into(
    writer: PackedWriter,
    packed_store: PackedStore,
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
) -> Facts:
    """Load the weights of a checkpoint into a packed file, without another copy in memory.

    Returns: the facts for the header of the file.
    Raises:
        CheckpointError: as ``Weights.load``.
        PackedFileError: the file cannot be written.
        UnpackableError: a layer holds a value that no file can store.
    """
    states: GroupData = {}

    def keep(number: int, group: LayerGroup) -> None:
        keep_states(states, number, group, writer.keep)

    # Kernels allocate packed tensors inside the file, so that nothing is copied.
    with host_memory.placed(writer.place):
        read(planned, checkpoint, weights, progress, keep)
    check = weights.check
    findings = None if check is None or check.policy == "off" else check.findings
    key = packed_store.key
    return Facts(key.requested, key.made_by, states, writer.memories, non_finite=findings)


def packed_file(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> PackedFile:
    """Return the packed weights of a plan; without a file, pack the weights and publish a file.

    The model stays on the meta device.

    Args:
        sleep: waits for a number of seconds while another process writes the file.
    Raises:
        CheckpointError: as ``Weights.load``.
        PackedFileError: the model has no packed form, or the file cannot be written.
        UnpackableError: a layer holds a value that no file can store.
    """
    packed_store = packed_store_of(planned, checkpoint)
    if (file := packed_store.find()) is not None:
        repeat_findings(weights, file.facts)
        progress(checkpoint.num_bytes)
        return file
    if refusal := packed_store.judge_space(checkpoint.num_bytes):
        raise PackedFileError(refusal)
    while True:
        try:
            writer = packed_store.writer(packed_store.cache_folder)
            break
        except BeingWrittenError:
            sleep(PAUSE_SECONDS)
    # From here on this process holds the lock of the file.
    try:
        if (file := packed_store.find()) is None:  # another process may have written one meanwhile
            facts = pack_into(writer, packed_store, planned, checkpoint, weights, progress)
            writer.publish(facts)
            packed_store.evict(writer.path)
            file = PackedFile(writer.path, facts)
    finally:
        writer.close()
    return file
