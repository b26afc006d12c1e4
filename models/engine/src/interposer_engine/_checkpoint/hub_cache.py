"""Models in the cache of huggingface_hub: listing, downloading and removing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interposer import Verdict
from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_engine._checkpoint.files import HubModel, read_json, weight_files

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

_COMMIT_DIGITS = 8


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One revision of a model in the cache of huggingface_hub.

    Attributes:
        name: ``namespace/name``.
        commit: the full hash.
        refs: the branches and tags that point to the commit.
        num_bytes: size of the files; revisions can share files.
        last_used: time of the last access to the model, in seconds since the epoch.
        loads: whether the engine loads it, by the architecture and the files.
    """

    name: str
    commit: str
    refs: tuple[str, ...]
    path: Path
    num_bytes: int
    last_used: float
    loads: Verdict

    @property
    def revision(self) -> str:
        """Names of the branches and tags; without any, the first digits of the commit hash."""
        return ", ".join(self.refs) or self.commit[:_COMMIT_DIGITS]


@dataclass(frozen=True, slots=True)
class Removal:
    """Planned removal of model revisions from the cache.

    Attributes:
        models: the revisions.
        freed_bytes: size of the files that no other revision needs.
        execute: removes them.
    """

    models: tuple[CachedModel, ...]
    freed_bytes: int
    execute: Callable[[], None]


def cached_models(architectures: Collection[str]) -> list[CachedModel]:
    """Return all cached revisions of all models, in the order of their last use.

    Args:
        architectures: the architectures that an installed family builds.
    """
    return sorted(
        _cached_models(_scan(), architectures), key=lambda m: (m.last_used, m.name, m.commit)
    )


def pull(name: str) -> Path:
    """Download the files of a model that are needed to load it, and return their folder.

    Raises:
        ConfigError: ``name`` is no name on a hub.
        CheckpointError: the model does not exist, needs permission, or cannot be downloaded.
    """
    model = _hub_model(name)
    folder = model.description()
    model.weights(folder, weight_files(folder))
    return folder


def removal(name: str) -> Removal:
    """Return the planned removal of all revisions of a model, or of the one named after ``@``.

    Raises:
        ConfigError: ``name`` is no name on a hub.
        UnknownNameError: the cache has no such model or revision.
    """
    # Imported here: the import takes long.
    from huggingface_hub import constants

    model, scanned = _hub_model(name), _scan()
    cached = list(_cached_models(scanned, ()))
    of_name = [m for m in cached if m.name == model.repository]
    hint = f"The cache is {constants.HF_HUB_CACHE}. `interposer list` lists its models."
    if scanned is None or not of_name:
        raise UnknownNameError("cached model", model.repository, {m.name for m in cached}, hint)
    chosen = [m for m in of_name if model.revision is None or _is_of(m, model.revision)]
    if not chosen:
        revisions = {r for m in of_name for r in (*m.refs, m.commit[:_COMMIT_DIGITS])}
        where = f"of the cached model {model.repository!r}"
        raise UnknownNameError("revision", str(model.revision), revisions, hint, where)
    strategy = scanned.delete_revisions(*(m.commit for m in chosen))
    return Removal(tuple(chosen), strategy.expected_freed_size, strategy.execute)


def _scan() -> HFCacheInfo | None:
    """Return huggingface_hub's description of the cache, or None if there is no cache yet."""
    # Imported here: the import takes long.
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _cached_models(
    scanned: HFCacheInfo | None, architectures: Collection[str]
) -> Iterator[CachedModel]:
    for repository in () if scanned is None else scanned.repos:
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            yield CachedModel(
                repository.repo_id,
                revision.commit_hash,
                tuple(sorted(revision.refs)),
                revision.snapshot_path,
                revision.size_on_disk,
                repository.last_accessed,
                _judge(revision.snapshot_path, architectures),
            )


def _judge(folder: Path, architectures: Collection[str]) -> Verdict:
    """Return whether the engine can load a cached model, judged by its config and file names."""
    if not (folder / "config.json").is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        return Verdict.refuse("a LoRA adapter" if is_adapter else "no config.json")
    try:
        named = read_json(folder / "config.json").get("architectures")
        files = weight_files(folder)
    except CheckpointError as error:
        return Verdict.refuse(error.reason)
    if not isinstance(named, list) or not named:
        return Verdict.refuse("config.json names no architecture")
    if not any(name in architectures for name in named):
        return Verdict.refuse(f"no model family for {named[0]}")
    if missing := [file for file in files if not (folder / file).is_file()]:
        return Verdict.refuse(f"{len(missing)} of {len(files)} weight files are missing")
    return Verdict.accept()


def _is_of(model: CachedModel, revision: str) -> bool:
    """Return whether a revision is a branch or tag of ``model``, or the start of its commit."""
    return revision in model.refs or model.commit.startswith(revision)


def _hub_model(name: str) -> HubModel:
    model = HubModel.named(name)
    if model is None:
        fault = "is a path on this disk" if Path(name).exists() else "is no name on a hub"
        raise ConfigError(f"{name!r} {fault}. Try: a name such as Qwen/Qwen3-0.6B")
    return model
