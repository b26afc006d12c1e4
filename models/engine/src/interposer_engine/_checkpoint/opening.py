"""Opening of checkpoints: model directories, model names on a hub, or files for a plugin."""

from __future__ import annotations

from pathlib import Path

from interposer import CheckpointFile, Choice, Config, Request, current_registry, select
from interposer.errors import (
    CheckpointError,
    InterposerError,
    PluginError,
    described,
    foreign_errors,
)
from interposer.records import CheckpointEntry
from interposer_engine._checkpoint.files import Checkpoint, HubModel, check_regular, weight_files
from interposer_engine._tokenizer import MissingTokenizer, TextTokenizer, has_vocabulary

_GGUF = "interposer-gguf"  # not always installed


def open_checkpoint(
    path: str | Path, config: Config
) -> tuple[Checkpoint | CheckpointFile, Choice | None]:
    """Open the checkpoint at ``path``, a model directory, hub name or plugin's file.

    For a name on a hub, only the description is downloaded, not the weights; see
    ``download_weights``.

    Returns: the checkpoint, and the choice of the plugin if a plugin reads the file.
    Raises:
        CheckpointError: ``path`` does not exist, is corrupt, or no plugin reads such files.
        PluginError: the plugin that reads such files failed.
    """
    file = Path(path)
    if hub_model := HubModel.named(path):
        return Checkpoint.open_description(hub_model.description(), hub_model), None
    if not file.is_dir():
        check_regular(file)
    if not file.is_file():
        return Checkpoint.open(file), None
    registry = current_registry(config)
    suffix, suffixes = file.suffix.lower(), registry.subjects("checkpoint")
    if suffix not in suffixes:
        reason = "is neither the folder of a model nor a file that an installed plugin reads"
        advice = "give the folder of a model, or its name on a hub"
        if suffixes:
            advice += f", or a file whose name ends in {' or '.join(suffixes)}"
        if suffix == ".gguf":
            fault, _, advice = registry.plugins.remedy(_GGUF).partition(".\nTry: ")
            reason = f"is read by {_GGUF}, which {fault}"
        raise CheckpointError(file, reason, advice)
    choice = select(Request("checkpoint", suffix), registry.candidates("checkpoint", suffix))
    chosen = choice.chosen
    assert isinstance(chosen.record, CheckpointEntry)
    file_class: type[CheckpointFile] = registry.load(chosen, chosen.record.target)
    try:
        return file_class.open(file), choice
    except InterposerError:
        raise
    except foreign_errors() as error:
        raise PluginError(
            registry.owner(chosen).name,
            chosen.origin,
            f"{file} cannot be opened: {described(error)}",
            "report it to its authors; it must raise CheckpointError for a corrupt file",
        ) from error


def download_weights(checkpoint: Checkpoint | CheckpointFile) -> Checkpoint | CheckpointFile:
    """Return the checkpoint with its weights, after downloading weights that are missing.

    Raises: CheckpointError: the weights cannot be downloaded, or are incomplete.
    """
    if isinstance(checkpoint, CheckpointFile) or checkpoint.source is None:
        return checkpoint
    checkpoint.source.weights(checkpoint.path, weight_files(checkpoint.path))
    return Checkpoint.open(checkpoint.path)


def open_folder(path: str | Path) -> Checkpoint:
    """Open the model directory at ``path``; if ``path`` is a hub name, download the model first.

    Raises: CheckpointError: the model does not exist, cannot be downloaded, or is corrupt.
    """
    if (hub_model := HubModel.named(path)) is None:
        return Checkpoint.open(path)
    folder = hub_model.description()
    hub_model.weights(folder, weight_files(folder))
    return Checkpoint.open(folder)


def config_source(checkpoint: Checkpoint | CheckpointFile) -> Path:
    """Return the file that contains the checkpoint's config."""
    if isinstance(checkpoint, CheckpointFile):
        return checkpoint.path
    return checkpoint.path / "config.json"


def tokenizer_of(checkpoint: Checkpoint | CheckpointFile) -> TextTokenizer:
    """Return the checkpoint's tokenizer; without tokenizer files, one that refuses texts.

    The files are read at first use, which raises CheckpointError if the tokenizer is not valid, or
    if a file of a plugin's format contains no tokenizer.
    """
    if isinstance(checkpoint, CheckpointFile):
        settings = checkpoint.tokenizer_settings()
        return TextTokenizer.of_json(checkpoint.tokenizer, checkpoint.path, settings)
    path = checkpoint.path
    return TextTokenizer(path) if has_vocabulary(path) else MissingTokenizer(path)
