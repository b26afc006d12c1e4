"""Kernels of the Hugging Face hub on this machine; nothing is downloaded or imported.

Source: ``kernels`` 0.17: ``_versions.py`` and ``resolver.py`` (the cache: a ref ``v1`` names the
commit of version 1, whose snapshot has a folder ``build`` of variants), ``load.py``
(``LOCAL_KERNELS``), ``archs.py`` (what an entry of a build's architectures runs on).
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
    """A kernel of the hub whose functions were read.

    Attributes:
        repository: whose publisher is trusted by naming it here; no other is looked for.
        version: as its branch ``v1`` is numbered.
    """

    repository: str
    version: int

    def folder(self) -> Path | None:
        """Return the folder that holds its builds, or None.

        ``LOCAL_KERNELS`` names one for a repository, else it is the snapshot in the hub's cache.
        """
        named = _named(variables()).get(self.repository)
        if named is not None:
            return named if named.is_dir() else None
        stored = _cache(variables()) / f"kernels--{self.repository.replace('/', '--')}"
        try:
            commit = (stored / "refs" / f"v{self.version}").read_text(encoding="utf-8").strip()
        except OSError:
            return None
        found = stored / "snapshots" / commit
        return found if (found / "build").is_dir() else None

    def judge(self, request: Request) -> Verdict:
        """Refuse where the package or the kernel is missing, or made for other devices."""
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
    """Judge kernels of ``ACTIVATION``."""
    return ACTIVATION.judge(request)


def judge_layer_norm(request: Request) -> Verdict:
    """Judge kernels of ``LAYER_NORM``."""
    return LAYER_NORM.judge(request)


_LEVELS = ("metadata.json", "*/metadata.json", "build/*/metadata.json")


@dataclass(frozen=True, slots=True)
class _Build:
    """The metadata of one variant."""

    backend: str
    architectures: tuple[str, ...]
    needs: tuple[str, ...]


def _builds(folder: Path) -> list[_Build]:
    found = []
    # A folder may be named that is the repository, its ``build`` or one variant.
    for path in sorted({path for level in _LEVELS for path in folder.glob(level)}):
        try:
            stated: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            backend = stated["backend"]
            needs = tuple(each["repo-id"] for each in stated.get("kernel-depends") or ())
            architectures = tuple(backend.get("archs") or ())
            found.append(_Build(str(backend["type"]), architectures, needs))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the package reads it again, and says what is wrong with the one it takes
    return found


def _judge_architecture(repository: str, builds: list[_Build], architecture: str) -> Verdict:
    """Refuse where all builds for CUDA name their architectures, and none is this device's."""
    number = re.fullmatch(r"sm_(\d+)(\d)[af]?", architecture)
    listed = [entry for build in builds for entry in build.architectures if build.backend == "cuda"]
    if not number or not listed or any(not b.architectures for b in builds if b.backend == "cuda"):
        return Verdict.accept()
    device = int(number[1]), int(number[2])
    if any(_runs_on(entry, device) for entry in listed):
        return Verdict.accept()
    known = ", ".join(sorted(set(listed)))
    return Verdict.refuse(f"{repository} was built for {known}, the device is {architecture}")


def _runs_on(entry: str, device: tuple[int, int]) -> bool:
    parsed = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", entry)
    if not parsed:
        return True  # of a newer builder, which the package will judge
    built = int(parsed[1]), int(parsed[2])
    if parsed[3] == "a":
        return device == built
    if parsed[4]:
        return device >= built
    return device[0] == built[0] and device[1] >= built[1]


def _cache(settings: Mapping[str, str]) -> Path:
    """Return the folder of the hub's cache, by the variables that the hub's package reads."""
    for name in ("KERNELS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if settings.get(name):
            return Path(settings[name]).expanduser()
    if settings.get("HF_HOME"):
        return Path(settings["HF_HOME"]).expanduser() / "hub"
    base = settings.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface/hub"


def _named(settings: Mapping[str, str]) -> dict[str, Path]:
    """Return what ``LOCAL_KERNELS`` names, ``repository=folder`` with colons in between."""
    entries = (entry.partition("=") for entry in settings.get("LOCAL_KERNELS", "").split(":"))
    return {repository: Path(folder) for repository, _, folder in entries if folder}
