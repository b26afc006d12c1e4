"""Packing on request: the file that loading maps, written beside a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interposer import Config
from interposer.errors import ConfigError
from interposer_models._checkpoint.files import open_checkpoint, with_weights
from interposer_models._checkpoint.weight_check import WeightCheck
from interposer_models._checkpoint.weights import Weights
from interposer_models._loader import plan
from interposer_models._packed.filling import REFUSALS, pack_into, shelf_of
from interposer_models._packed.packed_file import PackedFile, PackedFileError
from interposer_models._packed.shelf import files_in, folder_beside


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed file that was written.

    Attributes:
        num_bytes: of its weights.
    """

    path: Path
    num_bytes: int
    seconds: float


def pack(
    path: str | Path,
    output: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    platform: str | None = None,
    config: Config | None = None,
    *,
    quantization: str | Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Write what ``load`` with the same arguments would pack, so that it is mapped instead.

    Args:
        output: a folder; None takes the one that ``load`` looks into, beside the model.
        progress: told ``(bytes done, bytes in all)``.
    Raises:
        ConfigError: kernels or layers of the model hold what no file can, or the folder cannot be
            written.
    """
    start = time.perf_counter()
    planned = plan(path, dtype, platform, config, quantization=quantization)
    checkpoint = with_weights(planned.checkpoint)
    device = planned.placement.device.torch_device
    weights = Weights(planned.model, device, WeightCheck.of(planned))
    total, done = checkpoint.num_bytes, 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    try:
        shelf = shelf_of(planned, checkpoint)
        writer = shelf.writer(shelf.beside if output is None else Path(output))
        try:
            with planned.numerics():
                facts = pack_into(writer, shelf, planned, checkpoint, weights, advance)
            writer.publish(facts)
        finally:
            writer.close()
    except REFUSALS as error:
        raise ConfigError(f"{path} cannot be packed: {error}") from error
    num_bytes = sum(size for _, size in facts.memories)
    return Packed(writer.path, num_bytes, time.perf_counter() - start)


def check_packed(
    path: str | Path, output: str | Path | None = None, config: Config | None = None
) -> dict[Path, str]:
    """Return the packed files beside a model, or in ``output``, and what is wrong with each.

    All of them is read; an empty text is a sound file.
    """
    checkpoint, _ = open_checkpoint(path, config or Config())
    folder = folder_beside(checkpoint.path) if output is None else Path(output)
    return {file: _fault(file) for file in files_in(folder)}


def _fault(path: Path) -> str:
    try:
        PackedFile.open(path).check()
    except PackedFileError as error:
        return str(error)
    return ""
