"""Kernels of the Hugging Face Hub in this machine's cache; nothing is downloaded or imported.

Source: ``kernels`` 0.17: ``_versions.py`` and ``resolver.py`` (the cache: a ref ``v1`` names the
commit of version 1, whose snapshot has a folder ``build`` of variants), ``load.py``
(``LOCAL_KERNELS``), ``archs.py`` (the devices that an entry of a build's architectures runs on).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer import Request, Verdict
from interposer.tooling import variables
from interposer_cuda._providers import HUB_KERNELS


@dataclass(frozen=True, slots=True)
class HubKernel:
    """A kernel repository of the Hub whose functions the plugin can call.

    Attributes:
        repository: name of the repository. Only the repositories in this module are trusted.
        version: major version, such as 1 for the branch ``v1``.
    """

    repository: str
    version: int

    def folder(self) -> Path | None:
        """Return the folder of the kernel's builds; None if the machine has none.

        ``LOCAL_KERNELS`` takes precedence over the snapshot in the Hub's cache.
        """
        local = _local_kernels(variables()).get(self.repository)
        if local is not None:
            return local if local.is_dir() else None
        repository_folder = _cache(variables()) / f"kernels--{self.repository.replace('/', '--')}"
        try:
            commit = (
                (repository_folder / "refs" / f"v{self.version}")
                .read_text(encoding="utf-8")
                .strip()
            )
        except OSError:
            return None
        snapshot = repository_folder / "snapshots" / commit
        return snapshot if (snapshot / "build").is_dir() else None

    def judge(self, request: Request) -> Verdict:
        """Refuse a missing package, a missing kernel, or a kernel built for other devices."""
        verdict = HUB_KERNELS.judge()
        if not verdict:
            return verdict
        folder = self.folder()
        if folder is None:
            return Verdict.refuse(
                f"{self.repository} is not in the cache {_cache(variables())}, and nothing is "
                f"downloaded to choose. Try: kernels.install_kernel({self.repository!r}, "
                f"version={self.version}), or LOCAL_KERNELS={self.repository}=FOLDER"
            )
        builds = _builds(folder)
        if not builds:
            return Verdict.refuse(f"{self.repository} has no build with metadata.json in {folder}")
        needed = {repository for build in builds for repository in build.needs}
        if needed:
            return Verdict.refuse(
                f"{self.repository} needs {', '.join(sorted(needed))} of the hub, which loading it "
                "could download"
            )
        return _judge_architecture(self.repository, builds, request.capability.architecture)


ACTIVATION = HubKernel("kernels-community/activation", 1)
LAYER_NORM = HubKernel("kernels-community/layer-norm", 1)


def judge_activation(request: Request) -> Verdict:
    """Check that the activation kernels are in the cache and built for the device."""
    return ACTIVATION.judge(request)


def judge_layer_norm(request: Request) -> Verdict:
    """Check that the normalization kernels are in the cache and built for the device."""
    return LAYER_NORM.judge(request)


_METADATA_PATTERNS = ("metadata.json", "*/metadata.json", "build/*/metadata.json")


@dataclass(frozen=True, slots=True)
class _Build:
    """The metadata of one build variant."""

    backend: str
    architectures: tuple[str, ...]
    needs: tuple[str, ...]


def _builds(folder: Path) -> list[_Build]:
    builds = []
    # LOCAL_KERNELS may name the repository, its folder ``build`` or one variant.
    for path in sorted({path for level in _METADATA_PATTERNS for path in folder.glob(level)}):
        try:
            metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            backend = metadata["backend"]
            needs = tuple(
                dependency["repo-id"] for dependency in metadata.get("kernel-depends") or ()
            )
            architectures = tuple(backend.get("archs") or ())
            builds.append(_Build(str(backend["type"]), architectures, needs))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # loading reads the chosen variant again and reports its fault
    return builds


def _judge_architecture(repository: str, builds: list[_Build], architecture: str) -> Verdict:
    """Refuse a kernel whose CUDA builds all list architectures without this device's."""
    number = re.fullmatch(r"sm_(\d+)(\d)[af]?", architecture)
    listed_architectures = [
        entry for build in builds for entry in build.architectures if build.backend == "cuda"
    ]
    # A build without a list of architectures may run on any device, so nothing can be refused.
    if (
        not number
        or not listed_architectures
        or any(not b.architectures for b in builds if b.backend == "cuda")
    ):
        return Verdict.accept()
    device = int(number[1]), int(number[2])
    if any(_runs_on(entry, device) for entry in listed_architectures):
        return Verdict.accept()
    known_text = ", ".join(sorted(set(listed_architectures)))
    return Verdict.refuse(f"{repository} was built for {known_text}, the device is {architecture}")


def _runs_on(entry: str, device: tuple[int, int]) -> bool:
    parsed = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", entry)
    if not parsed:
        return True  # a newer builder's notation, which the package checks when it loads
    built = int(parsed[1]), int(parsed[2])
    # "a": this architecture only; "+PTX": intermediate code, which newer devices compile.
    if parsed[3] == "a":
        return device == built
    if parsed[4]:
        return device >= built
    return device[0] == built[0] and device[1] >= built[1]


def _cache(settings: Mapping[str, str]) -> Path:
    """Return the folder of the Hub's cache from the variables that huggingface_hub reads."""
    for name in ("KERNELS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if settings.get(name):
            return Path(settings[name]).expanduser()
    if settings.get("HF_HOME"):
        return Path(settings["HF_HOME"]).expanduser() / "hub"
    base = settings.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface/hub"


def _local_kernels(settings: Mapping[str, str]) -> dict[str, Path]:
    """Parse ``LOCAL_KERNELS``: entries ``repository=folder``, separated by colons."""
    entries = (entry.partition("=") for entry in settings.get("LOCAL_KERNELS", "").split(":"))
    return {repository: Path(folder) for repository, _, folder in entries if folder}
