"""The function ``pack``: writes the packed weights of a model to a file that ``load`` maps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interposer import Config
from interposer.errors import ConfigError
from interposer_engine._checkpoint.opening import download_weights, open_checkpoint
from interposer_engine._checkpoint.weight_check import WeightCheck
from interposer_engine._checkpoint.weights import Weights
from interposer_engine._packed.file import PackedFile, PackedFileError
from interposer_engine._packed.loading import REFUSALS, pack_into, packed_store_of
from interposer_engine._packed.store import files_in, folder_next_to
from interposer_engine._planning import plan


@dataclass(frozen=True, slots=True)
class Packed:
    """The result of ``pack``: path and size of the packed file, and the seconds that packing took.

    Attributes:
        num_bytes: size of the packed weights.
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
    """Write a model's packed weights, which ``load`` with the same arguments then maps.

    Args:
        output: a folder; None is the folder next to the model, where ``load`` searches.
        progress: called with ``(bytes done, bytes in all)``.
    Raises:
        ConfigError: a kernel or layer holds a value that no file can store, or the folder cannot be
            written.
    """
    start = time.perf_counter()
    planned = plan(path, dtype, platform, config, quantization=quantization)
    checkpoint = download_weights(planned.checkpoint)
    device = planned.placement.device.torch_device
    weights = Weights(planned.model, device, WeightCheck.of(planned))
    total_bytes, done_bytes = checkpoint.num_bytes, 0

    def advance(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    try:
        packed_store = packed_store_of(planned, checkpoint)
        writer = packed_store.writer(packed_store.model_folder if output is None else Path(output))
        try:
            # With the numerics of ``load``, kernels prepare the same constants.
            with planned.numerics():
                facts = pack_into(writer, packed_store, planned, checkpoint, weights, advance)
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
    """Read all packed files of a model, and return each file's defect; "" for a valid file.

    Args:
        output: the folder to search; None is the folder next to the model.
    """
    checkpoint, _ = open_checkpoint(path, config or Config())
    folder = folder_next_to(checkpoint.path) if output is None else Path(output)
    return {file: _fault(file) for file in files_in(folder)}


def _fault(path: Path) -> str:
    try:
        PackedFile.open(path).check()
    except PackedFileError as error:
        return str(error)
    return ""
