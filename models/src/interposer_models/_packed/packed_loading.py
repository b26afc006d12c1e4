"""Weights of a plan: mapped from a packed file, or read from the checkpoint and packed.

The one seam between loading and packed files is ``load_weights``.
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
from interposer_models._packed.filling import (
    PAUSE_SECONDS,
    attempted,
    pack_into,
    read,
    repeat_findings,
    restore,
    shelf_of,
)
from interposer_models._packed.packed_file import BeingWrittenError, Facts, PackedFileError
from interposer_models._packed.shelf import LEAST_BYTES
from interposer_models._plan import Plan

_log = logging.getLogger("interposer")


class _SmallError(PackedFileError):
    """A checkpoint is too small for a file to be worth while, of which nobody needs to know."""


class _DividedError(PackedFileError):
    """Several ranks have the model, which is no fault that anybody should mend."""


def load_weights(
    planned: Plan,
    checkpoint: Checkpoint | CheckpointFile,
    weights: Weights,
    progress: Progress,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fill the model of a plan, and note where from.

    Args:
        sleep: waits for so many seconds while another process writes the file.
    Raises:
        CheckpointError: as ``Weights.load``.
        ConfigError: ``packed`` is ``"on"``, and no packed weights can be used.
    """
    wanted = planned.resolver.config.packed

    def mapped(advance: Progress) -> None:
        _map(planned, checkpoint, weights, advance)

    if wanted != "off":
        refusal = attempted(mapped, progress)
        while wanted == "on" and isinstance(refusal, BeingWrittenError):
            sleep(PAUSE_SECONDS)
            refusal = attempted(mapped, progress)
        if refusal is None:
            return
        if wanted == "on":
            raise ConfigError(f"packed='on' was asked for, but {refusal}") from refusal
        note = f"packed weights: none, {refusal}"
        if isinstance(refusal, _DividedError):
            planned.resolver.notes.append(note)
        elif not isinstance(refusal, _SmallError):
            _tell(planned, note)
    read(planned, checkpoint, weights, progress)


def _map(
    planned: Plan, checkpoint: Checkpoint | CheckpointFile, weights: Weights, progress: Progress
) -> None:
    """Fill the model with what is mapped, and publish it in a thread where it is new.

    Raises:
        CheckpointError: as ``Weights.load``.
        PackedFileError: that cannot be; as a BeingWrittenError, another process packs it now.
        UnpackableError: a layer holds what no file can.
    """
    if planned.resolver.ranks is not None:
        raise _DividedError("each rank holds shares of its own, and files hold whole models")
    shelf = shelf_of(planned, checkpoint)
    found = shelf.find()
    if found is not None:
        try:
            restore(weights, found.facts.states, found.memory().__getitem__)
        except PackedFileError as error:
            shelf.refused.append(f"{found.path}: {error}")
            found = None
    for reason in shelf.refused:
        _tell(planned, f"packed weights: not used, {reason}")
    num_bytes = checkpoint.num_bytes
    if found is not None:
        repeat_findings(weights, found.facts)
        _note(planned, found.facts, found.path)
        progress(num_bytes)
        return
    if num_bytes < LEAST_BYTES and planned.resolver.config.packed == "auto":
        raise _SmallError(f"it has {num_bytes} bytes, fewer than {LEAST_BYTES}")
    if refused := shelf.judge_room(num_bytes):
        raise PackedFileError(refused)
    writer = shelf.writer(shelf.kept)
    try:
        facts = pack_into(writer, shelf, planned, checkpoint, weights, progress)
        restore(weights, facts.states, writer.memory().__getitem__)
    except BaseException:
        writer.close()
        raise
    _note(planned, facts, writer.path)
    shelf.publish_soon(writer, facts)


def _note(planned: Plan, facts: Facts, path: Path) -> None:
    num_bytes = sum(size for _, size in facts.memories)
    planned.resolver.notes.append(f"packed weights: {num_bytes >> 20} MiB, mapped from {path}")


def _tell(planned: Plan, note: str) -> None:
    planned.resolver.notes.append(note)
    _log.warning("%s: %s", planned.path, note)
