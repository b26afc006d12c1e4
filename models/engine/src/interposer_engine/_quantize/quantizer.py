"""The function ``quantize``, which writes a quantized copy of a model directory."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from interposer import Config
from interposer.errors import CheckpointError, ConfigError
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.opening import open_folder
from interposer_engine._planning import plan
from interposer_engine._quantize.calibration import calibration_sequences
from interposer_engine._quantize.files import TensorSource
from interposer_engine._quantize.rounding import (
    Progress,
    RoundedLayers,
    check_groups,
    fitting_group_size,
    layers_of,
    plain_patterns,
    unignored_layers,
    unused_layers,
)
from interposer_engine._quantize.writer import CopyWriter, WorkFolder
from interposer_engine._tokenizer import TextTokenizer
from interposer_quantization.writing import quantization_config, weight_format


@dataclass(frozen=True, slots=True)
class Quantized:
    """The result of ``quantize``: the written folder, sizes and quantized layers.

    Attributes:
        num_layers: linear layers that were quantized.
        num_plain: linear layers that stay unquantized, not counting ``lm_head``.
        group_size: inputs per scale; None for one scale per output.
        resumed: the call continued the work of an interrupted one.
    """

    path: Path
    scheme: str
    num_layers: int
    num_plain: int
    group_size: int | None
    bytes_before: int
    bytes_after: int
    seconds: float
    resumed: bool


def quantize(
    model_dir: str | Path,
    out_dir: str | Path,
    scheme: str,
    *,
    group_size: int | None = None,
    asymmetric: bool = False,
    activations: str | None = None,
    ignore: Sequence[str] = (),
    calibrate: str | Path | None = None,
    act_order: bool = True,
    restart: bool = False,
    config: Config | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Write a copy of a model with quantized linear layers, in the compressed-tensors format.

    The complete copy appears atomically. An interrupted call leaves unfinished work in
    ``.NAME.unfinished`` next to the target, and the same call continues from there.

    Args:
        scheme: one of ``interposer_quantization.writing._schemes.SCHEMES``.
        group_size: inputs per scale of int4 and w4a8, by default the first of 128, 64, 32 and 16
            that divides the inputs of every layer.
        asymmetric: int4 and w4a8 with a zero point for each group.
        activations: ``"int8"`` quantizes the inputs of int8 or int4 per token, ``"none"`` does not;
            by default int8 quantizes inputs and int4 does not.
        ignore: linear layers that stay unquantized: full names, or ``re:`` and a pattern that
            matches at the start of a full name. ``lm_head`` is never quantized.
        calibrate: a text in UTF-8; GPTQ rounds weights so that the layers' outputs on this text
            change least. None rounds each weight to nearest.
        act_order: with ``calibrate``, round the columns with the largest inputs first.
        restart: discard the work of an interrupted call.
        config: policy by which the model runs on the text.
        progress: called with ``(activity, done, total)``.
    Raises:
        CheckpointError: the model directory is incomplete, corrupt or quantized already.
        UnsupportedModelError: no installed family implements the architecture.
        UnknownNameError: there is no such scheme or layer.
        ConfigError: the settings contradict each other or the model; the text is too short.
        StorageError: the target exists or cannot be written, or an interrupted call had other
            settings.
    """
    started = time.perf_counter()
    format_of = partial(weight_format, scheme, asymmetric=asymmetric, activations=activations)
    target_format = format_of(group_size)  # before the plan, because it checks the arguments
    checkpoint = open_folder(model_dir)
    _check_plain(checkpoint)
    text = None if calibrate is None else Path(calibrate)
    # Everything that the result depends on; a resumed run must have equal settings.
    settings: dict[str, Any] = {
        "version": 1,
        "scheme": scheme,
        "asymmetric": asymmetric,
        "activations": activations,
        "ignore": list(ignore),
        "calibrate": None if text is None else _digest(text),
        "act_order": act_order if text is not None else None,
        "config": _digest(checkpoint.path / "config.json"),
        "weights": [_identity(shard) for shard in checkpoint.shards],
    }
    # A plan has no weights: it names the layers and, with a text, runs block by block.
    planned = plan(checkpoint.path, "float32", config=config)
    layers = layers_of(planned.model)
    selected = unignored_layers(layers, ignore)
    has_groups = scheme in ("int4", "w4a8")
    if has_groups and group_size is None and target_format.inputs_per_scale is not None:
        target_format = format_of(fitting_group_size(selected, target_format.inputs_per_scale))
    settings["group_size"] = target_format.inputs_per_scale
    check_groups(selected, target_format, adjustable=has_groups)
    source = TensorSource(checkpoint.shards, getattr(planned.model, "renamed", str))
    rounded = RoundedLayers(source, target_format, selected, checkpoint.path)
    writer = CopyWriter(checkpoint, source, rounded)
    sequences = None
    if text is not None:
        sequences = calibration_sequences(
            text,
            TextTokenizer(checkpoint.path),
            planned.decoder.max_position_embeddings,
            max(layer.in_features for layer in selected),
        )
    # After all checks of the arguments, so that a refused call leaves no folder.
    folder = WorkFolder.open(Path(out_dir), settings, restart=restart)
    writer.check_disk_space(
        folder, rounded.remaining_bytes(folder.layers, planned) if text is not None else 0
    )
    report = progress or _silent
    if sequences is not None:
        with planned.numerics():
            rounded.calibrate(folder.layers, planned, sequences, act_order, report)
    writer.write_weights(folder, report)
    plain = ["lm_head", *ignore, *plain_patterns(planned.model), *unused_layers(source)]
    plain = [*dict.fromkeys(plain)]
    writer.write_rest(folder, quantization_config(target_format, plain))
    folder.finish()
    return Quantized(
        folder.target,
        scheme,
        len(selected),
        len(layers) - len(selected),
        target_format.inputs_per_scale,
        checkpoint.num_bytes,
        sum(path.stat().st_size for path in folder.target.glob("*.safetensors")),
        time.perf_counter() - started,
        folder.resumed,
    )


def _check_plain(checkpoint: Checkpoint) -> None:
    for key in ("quantization_config", "compression_config"):
        quantization = checkpoint.config.get(key)
        if quantization is not None:
            method = (
                quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            )
            raise CheckpointError(
                checkpoint.path,
                f"is quantized already: {key} in its config.json names {method!r}",
                "quantize the model that it was made from",
            )


def _identity(path: Path) -> dict[str, Any]:
    """Return facts about a weights file that change when the file is replaced or modified."""
    status = path.stat()
    return {"file": path.name, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {error.strerror or error}. Try: name a readable file"
        ) from error


def _silent(_activity: str, _done: int, _total: int) -> None:
    pass
