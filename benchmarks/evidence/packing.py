"""The making of a bundle: our wheels, and those that the target lacks of what they require."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from evidence.manifest import Bundle, Wheel, sha256
from evidence.target import Target

__all__ = ["ROOT", "Packer", "PackingError", "distributions"]

ROOT = Path(__file__).parents[2]
# A bundle is for another Python, and what is compiled here may not run there.
_PURE = ("--config-settings=wheel.cmake=false", "--config-settings=wheel.exclude=*.so")
_PURE_TAGS = ("--config-settings=wheel.py-api=py3", "--config-settings=wheel.platlib=false")


class PackingError(Exception):
    """The bundle cannot be made; the text says why and what to do."""


def distributions(root: Path = ROOT) -> list[str]:
    """Return the folders of all distributions, as the Makefile finds them."""
    patterns = ("*/pyproject.toml", "*/*/pyproject.toml")
    files = sorted(file for pattern in patterns for file in root.glob(pattern))
    return [file.parent.relative_to(root).as_posix() for file in files]


class Packer:
    """Collects wheels for a target in a folder."""

    def __init__(self, target: Target, folder: Path, constraints: Path | None = None) -> None:
        self.target = target
        self.folder = folder
        self.pins = dict(_pins(constraints, target)) if constraints else {}
        self.tags = set(_tags(target))
        self.wanted: dict[str, SpecifierSet] = {}
        self.ours: set[str] = set()

    def pack(self, folders: Sequence[str], root: Path = ROOT) -> Bundle:
        """Build our distributions, fetch what they require, and write the manifest.

        Raises: PackingError: something cannot be built, had, or carried.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._build([root / name for name in folders if name not in self.target.left_out])
        self._complete()
        bundle = Bundle(self.folder, self.target.python, _commit(root), tuple(self._wheels()))
        bundle.write()
        limit = self.target.limit_mib << 20
        if bundle.num_bytes > limit:
            largest = sorted(self.folder.iterdir(), key=lambda file: -file.stat().st_size)[:3]
            named = ", ".join(f"{f.name} {f.stat().st_size / 2**20:.1f} MiB" for f in largest)
            raise PackingError(
                f"{self.folder} takes {bundle.num_bytes / 2**20:.1f} MiB, more than "
                f"{self.target.limit_mib}: {named}. Try: list what the target has under "
                "'installed' in target.toml"
            )
        return bundle

    def _build(self, folders: Sequence[Path]) -> None:
        with tempfile.TemporaryDirectory() as copies:
            sources = []
            for folder in folders:
                # A build of its own, as what an editable installation keeps in the source is not
                # of this build.
                copy = Path(copies) / folder.name
                ignored = shutil.ignore_patterns("tests", "build", "*.so", "__pycache__", "dist")
                shutil.copytree(folder, copy, ignore=ignored)
                sources.append(copy)
            native = [s for s in sources if "scikit_build_core" in _text(s / "pyproject.toml")]
            plain = [source for source in sources if source not in native]
            for group, options in ((plain, ()), (native, (*_PURE, *_PURE_TAGS))):
                if group:
                    self._pip("wheel", "--no-build-isolation", *options, *map(str, group))
        for file in self.folder.glob("*.whl"):
            name, _, _, _ = parse_wheel_filename(file.name)
            self.ours.add(name)
        if len(self.ours) != len(folders):
            raise PackingError(f"{len(folders)} distributions made {len(self.ours)} wheels")

    def _complete(self) -> None:
        """Fetch what is required and not there, until nothing is."""
        pending = [Requirement(text) for text in self.target.tests]
        seen: set[str] = set()
        while True:
            for file in self.folder.glob("*.whl"):
                if file.name not in seen:
                    seen.add(file.name)
                    pending += self._requirements(file)
            missing = [name for name in self._noted(pending) if not self._file_of(name)]
            pending = []
            if not missing:
                return
            self._fetch(missing)

    def _noted(self, requirements: Iterable[Requirement]) -> list[str]:
        """Return the names that are required of us, and keep the versions that serve."""
        for requirement in requirements:
            name = canonicalize_name(requirement.name)
            if name in self.target.installed:
                version = self.target.installed[name]
                if version and not requirement.specifier.contains(version, prereleases=True):
                    raise PackingError(
                        f"{requirement} is required, and the target has {name} {version}. Try: "
                        "carry it, by removing it from 'installed' in target.toml"
                    )
                continue
            self.wanted[name] = self.wanted.get(name, SpecifierSet()) & requirement.specifier
        return sorted(self.wanted)

    def _fetch(self, names: Sequence[str]) -> None:
        asked = [f"{name}{self.pins.get(name) or self.wanted[name]}" for name in names]
        target = self.target
        self._pip(
            "download",
            "--only-binary=:all:",
            f"--python-version={target.python}",
            f"--implementation={target.implementation}",
            *(f"--platform={tag}" for tag in target.platforms),
            *asked,
        )

    def _pip(self, command: str, *arguments: str) -> None:
        call = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps"]
        place = "--wheel-dir" if command == "wheel" else "--dest"
        done = subprocess.run(
            [*call, place, str(self.folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            told = "\n".join(line for line in done.stderr.splitlines() if "WARNING" not in line)
            raise PackingError(f"pip {command} failed:\n{told[-2000:]}")

    def _requirements(self, file: Path) -> Iterator[Requirement]:
        """Yield the requirements of a wheel that apply on the target."""
        name, _, _, _ = parse_wheel_filename(file.name)
        extras = ("", *self.target.extras) if name in self.ours else ("",)
        for text in _metadata(file).get_all("Requires-Dist", []):
            requirement = Requirement(text)
            environments = [{**self.target.markers, "extra": extra} for extra in extras]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                yield requirement

    def _file_of(self, name: str) -> Path | None:
        for file in self.folder.glob("*.whl"):
            if parse_wheel_filename(file.name)[0] == name:
                return file
        return None

    def _wheels(self) -> Iterator[Wheel]:
        for file in sorted(self.folder.glob("*.whl")):
            name, version, _, tags = parse_wheel_filename(file.name)
            if not tags & self.tags:
                raise PackingError(f"{file.name} does not install on {self.target.python}")
            wanted = self.wanted.get(name, SpecifierSet())
            if not wanted.contains(version, prereleases=True):
                raise PackingError(f"{file.name} was had, and {name}{wanted} is required")
            yield Wheel(file.name, name, str(version), sha256(file), str(wanted), name in self.ours)


def _pins(constraints: Path, target: Target) -> Iterator[tuple[str, str]]:
    for line in _text(constraints).splitlines():
        name, equals, version = line.partition("==")
        if equals and canonicalize_name(name) not in target.installed:
            yield canonicalize_name(name), f"=={version}"


def _tags(target: Target) -> Iterator[Tag]:
    version = tuple(map(int, target.python.split(".")))
    platforms = [*target.platforms, f"linux_{target.machine}"]
    yield from cpython_tags(version, platforms=platforms)
    yield from compatible_tags(version, platforms=platforms)


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return BytesHeaderParser().parsebytes(archive.read(name))


def _commit(root: Path) -> str:
    call = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
