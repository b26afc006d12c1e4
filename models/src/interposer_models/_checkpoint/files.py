"""Opening checkpoints: a model directory, a model's name, or a file of a format of a plugin."""

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
from interposer_models._checkpoint.checkpoint import Checkpoint, weight_files
from interposer_models._checkpoint.hub import HubModel
from interposer_models._checkpoint.regular_files import check_regular
from interposer_models._tokenizer import MissingTokenizer, TextTokenizer, has_vocabulary


def open_checkpoint(
    path: str | Path, config: Config
) -> tuple[Checkpoint | CheckpointFile, Choice | None]:
    """Return the checkpoint at ``path``, and the choice of the plugin that reads a file.

    Of a model that is named, only the description is fetched; ``with_weights`` fetches the rest.

    Raises:
        CheckpointError: it does not exist, is corrupt, or nobody reads such files.
        PluginError: the plugin that reads such files failed.
    """
    file = Path(path)
    if named := HubModel.named(path):
        return Checkpoint.described(named.description(), named), None
    if not file.is_dir():
        check_regular(file)
    if not file.is_file():
        return Checkpoint.open(file), None
    registry = current_registry(config)
    suffix, known = file.suffix.lower(), registry.subjects("checkpoint")
    if suffix not in known:
        raise CheckpointError(
            file,
            "is not a directory",
            "give the folder of a downloaded model, or a file that a plugin reads; those that are "
            f"installed read: {', '.join(known) or 'none'}",
        )
    choice = select(Request("checkpoint", suffix), registry.candidates("checkpoint", suffix))
    chosen = choice.chosen
    assert isinstance(chosen.record, CheckpointEntry)
    kind: type[CheckpointFile] = registry.load(chosen, chosen.record.target)
    try:
        return kind.open(file), choice
    except InterposerError:
        raise
    except foreign_errors() as error:
        raise PluginError(
            registry.owner(chosen).name,
            chosen.origin,
            f"{file} cannot be opened: {described(error)}",
            "report it to its authors; it must raise CheckpointError for a corrupt file",
        ) from error


def with_weights(checkpoint: Checkpoint | CheckpointFile) -> Checkpoint | CheckpointFile:
    """Return the checkpoint, with its weights if only its description was fetched.

    Raises: CheckpointError: they cannot be fetched, or are incomplete.
    """
    if isinstance(checkpoint, CheckpointFile) or checkpoint.source is None:
        return checkpoint
    checkpoint.source.weights(checkpoint.path, weight_files(checkpoint.path))
    return Checkpoint.open(checkpoint.path)


def open_folder(path: str | Path) -> Checkpoint:
    """Return the checkpoint in a folder, or of a model that is named, with its weights.

    Raises: CheckpointError: it does not exist, cannot be fetched, or is corrupt.
    """
    if (named := HubModel.named(path)) is None:
        return Checkpoint.open(path)
    folder = named.description()
    named.weights(folder, weight_files(folder))
    return Checkpoint.open(folder)


def config_source(checkpoint: Checkpoint | CheckpointFile) -> Path:
    """Return the file that the checkpoint's config stands in."""
    if isinstance(checkpoint, CheckpointFile):
        return checkpoint.path
    return checkpoint.path / "config.json"


def tokenizer_of(checkpoint: Checkpoint | CheckpointFile) -> TextTokenizer:
    """Return the checkpoint's tokenizer, or what refuses texts where a directory has none.

    It is read when it is first asked for; that raises CheckpointError if it is not valid, or a file
    of a plugin's format holds none.
    """
    if isinstance(checkpoint, CheckpointFile):
        settings = checkpoint.tokenizer_settings()
        return TextTokenizer.of_json(checkpoint.tokenizer, checkpoint.path, settings)
    path = checkpoint.path
    return TextTokenizer(path) if has_vocabulary(path) else MissingTokenizer(path)
