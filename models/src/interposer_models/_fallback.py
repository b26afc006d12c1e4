"""Load checkpoints of an architecture without an installed family, with a plugin's loader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer import CheckpointFile, Config, current_registry
from interposer.errors import InterposerError, PluginError, described, foreign_errors
from interposer.tooling import entry_points
from interposer_models._checkpoint.files import open_checkpoint

if TYPE_CHECKING:
    from interposer_models._language_model import LanguageModel

GROUP = "interposer.loaders"


def load_without_family(
    path: str | Path, config: Config, options: Mapping[str, Any]
) -> LanguageModel | None:
    """Load a model with a loader of the entry points ``interposer.loaders``.

    A loader is called with the checkpoint (weights may not be downloaded yet), the policy and
    the other arguments of ``load``.

    Args:
        options: arguments of ``load`` by name, except ``path``, ``platform`` and ``config``.
    Returns: None if a family supports the architecture, the checkpoint is no folder, or no loader
        is installed.
    Raises:
        UnsupportedModelError: the loader cannot run the architecture.
        ConfigError: the loader does not accept an option.
        PluginError: the loader failed.
    """
    checkpoint, _ = open_checkpoint(path, config)
    # A file format of a plugin, such as GGUF; loaders read folders only.
    if isinstance(checkpoint, CheckpointFile):
        return None
    architectures = checkpoint.config.get("architectures")
    supported = current_registry(config).subjects("model")
    if not isinstance(architectures, list) or any(str(name) in supported for name in architectures):
        return None
    # With several loaders, the choice must not depend on the order of installation.
    points = sorted(entry_points(GROUP), key=lambda point: (point.name, point.value))
    if not points:
        return None
    point = points[0]
    try:
        loader = point.load()
        model: LanguageModel = loader(checkpoint, config, **options)
    except InterposerError:
        raise
    except foreign_errors() as error:
        origin = point.dist.name if point.dist is not None else point.value
        raise PluginError(
            point.name,
            origin,
            f"its loader failed for {checkpoint.path}: {described(error)}",
            "report it to its authors, or uninstall it",
        ) from error
    return model
