"""Loads the weights of a plan: maps a packed file, or reads and packs the checkpoint.

``load_weights`` is the only integration point between model loading and packed files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from interposer import CheckpointFile
from interposer.errors import ConfigError
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.weights import Progress, Weights
from interposer_models._packed.loading_steps import (
    PAUSE_SECONDS,
    pack_into,
    packed_store_of,
    read,
    repeat_findings,
    restore,
    try_loading,
)
from interposer_models._packed.packed_file import BeingWrittenError, Facts, PackedFileError
from interposer_models._packed.packed_store import MIN_BYTES
from interposer_models._plan import Plan

_log = logging.getLogger("interposer")


class _TooSmallError(PackedFileError):
    """The checkpoint is too small to be worth packing; no note is necessary."""


class _RankedModelError(PackedFileError):
    """The model runs on several ranks; that needs a note, but no warning."""


def load_weights(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Load the weights of a plan's model, and note the source.

    Args:
        sleep: waits for a number of seconds while another process writes the file.
    Raises:
        CheckpointError: as ``Weights.load``.
        ConfigError: ``packed`` is ``"on"``, and no packed weights can be used.
    """
    setting = planned.resolver.config.packed

    def mapped(advance: Progress) -> None:
        _map(planned, checkpoint, weights, advance)

    if setting != "off":
        refusal = try_loading(mapped, progress)
        # With "auto", reading the checkpoint is faster than waiting for another process.
        while setting == "on" and isinstance(refusal, BeingWrittenError):
            sleep(PAUSE_SECONDS)
            refusal = try_loading(mapped, progress)
        if refusal is None:
            return
        if setting == "on":
            raise ConfigError(f"packed='on' was asked for, but {refusal}") from refusal
        note = f"packed weights: none, {refusal}"
        if isinstance(refusal, _RankedModelError):
            planned.resolver.notes.append(note)
        elif not isinstance(refusal, _TooSmallError):
            _note_and_warn(planned, note)
    read(planned, checkpoint, weights, progress)


def _map(
    planned: Plan, checkpoint: Checkpoint | CheckpointFile, weights: Weights, progress: Progress
) -> None:
    """Set the model to mapped packed weights; pack weights first if there is no file.

    A thread publishes the new file.

    Raises:
        CheckpointError: as ``Weights.load``.
        BeingWrittenError: another process writes the file now.
        PackedFileError: the weights cannot be packed or mapped.
        UnpackableError: a layer holds a value that no file can store.
    """
    if planned.resolver.ranks is not None:
        raise _RankedModelError("each rank holds shares of its own, and files hold whole models")
    packed_store = packed_store_of(planned, checkpoint)
    file = packed_store.find()
    if file is not None:
        try:
            restore(weights, file.facts.states, file.memory().__getitem__)
        except PackedFileError as error:
            packed_store.refusals.append(f"{file.path}: {error}")
            file = None
    for reason in packed_store.refusals:
        _note_and_warn(planned, f"packed weights: not used, {reason}")
    num_bytes = checkpoint.num_bytes
    if file is not None:
        repeat_findings(weights, file.facts)
        _note(planned, file.facts, file.path)
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
    _note(planned, facts, writer.path)
    packed_store.publish_soon(writer, facts)


def _note(planned: Plan, facts: Facts, path: Path) -> None:
    num_bytes = sum(size for _, size in facts.memories)
    planned.resolver.notes.append(f"packed weights: {num_bytes >> 20} MiB, mapped from {path}")


def _note_and_warn(planned: Plan, note: str) -> None:
    planned.resolver.notes.append(note)
    _log.warning("%s: %s", planned.path, note)
