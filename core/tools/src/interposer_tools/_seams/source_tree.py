"""The Python source of one distribution: a wheel, an sdist, a folder or an installed package."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import importlib_metadata
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from interposer.errors import ConfigError

__all__ = ["SourceTree"]

_COMPILED = (".so", ".pyd")
# Top-level folders of archives and checkouts that hold no importable package of the distribution.
_OTHER_FOLDERS = frozenset({"tests", "test", "docs", "benchmarks", "examples", "tools", "build"})
_METADATA = re.compile(r"^(Name|Version):\s*(\S+)\s*$", re.MULTILINE)
_VERSION_ASSIGNMENT = re.compile(r"""^__version__\s*(?::\s*str\s*)?=.*?["'](\d[^"']*)["']""", re.M)


@dataclass(frozen=True)
class SourceTree:
    """The modules of one distribution as text; no code is imported.

    Attributes:
        name: canonical name of the distribution, or of the folder if there is no metadata.
        version: version of the distribution, "" if unknown.
        location: the path or "environment", for messages.
        sources: text of each module, by dotted name.
        files: path of each module inside the distribution, by dotted name.
        compiled: dotted names of compiled modules, whose content cannot be read.
    """

    name: str
    version: str
    location: str
    sources: Mapping[str, str] = field(repr=False)
    files: Mapping[str, str] = field(repr=False)
    compiled: frozenset[str] = field(repr=False)

    @classmethod
    def open(cls, target: str) -> SourceTree:
        """Read a wheel, an sdist, an unpacked folder, or an installed distribution by its name.

        Raises: ConfigError: no such file or distribution, or a file without Python modules.
        """
        path = Path(target)
        if path.is_dir():
            return cls._of(path.name, str(path), _folder_files(path))
        if path.is_file():
            return cls._of(path.name, str(path), _archive_files(path))
        if "/" in target or path.suffix in (".whl", ".gz", ".zip", ".tar"):
            raise ConfigError(
                f"{target}: no such file or folder. Try: pip download --no-deps --dest wheels "
                "DIST==VERSION, then the path of the file in wheels"
            )
        return cls.installed(target)

    @classmethod
    def installed(cls, name: str) -> SourceTree:
        """Read the modules of an installed distribution.

        Raises: ConfigError: the distribution is not installed here.
        """
        try:
            distribution = importlib_metadata.distribution(name)
        except importlib_metadata.PackageNotFoundError:
            raise ConfigError(
                f"{name!r} is neither a path nor an installed distribution. Try: pip install "
                f"{name}, or the path of its wheel, sdist or source folder"
            ) from None
        tree = cls._of(name, "environment", _installed_files(distribution))
        return cls(
            canonicalize_name(distribution.name),
            distribution.version,
            "environment",
            tree.sources,
            tree.files,
            tree.compiled,
        )

    @classmethod
    def _of(
        cls, label: str, location: str, files: Iterator[tuple[str, bytes | None]]
    ) -> SourceTree:
        """Create a tree from pairs of a path and the content, None for a compiled module."""
        sources: dict[str, str] = {}
        paths: dict[str, str] = {}
        compiled = set()
        name, version = _from_file_name(label)
        for path, content in files:
            if PurePosixPath(path).name in ("METADATA", "PKG-INFO"):
                # Nested metadata of vendored packages must not win over the distribution's own.
                if content is not None and path.count("/") <= 1:
                    facts = dict(_METADATA.findall(content.decode("utf-8", "replace")))
                    name, version = facts.get("Name", name), facts.get("Version", version)
                continue
            module = _module_name(path)
            if content is None:
                compiled.add(module)
            elif module not in sources:
                sources[module] = content.decode("utf-8", "replace")
                paths[module] = path
        if not sources:
            raise ConfigError(
                f"{location}: contains no Python modules. Try: a wheel, an sdist, or the folder "
                "that contains the package"
            )
        if not version:
            version = _version_in(sources)
        return cls(canonicalize_name(name), version, location, sources, paths, frozenset(compiled))

    @property
    def label(self) -> str:
        """Name and version, such as ``vllm 0.33.0``, or the location if the version is unknown."""
        return f"{self.name} {self.version}" if self.version else self.location

    @property
    def sort_key(self) -> tuple[bool, Version | str]:
        """Order of versions; trees without a readable version come last, by location."""
        try:
            return (False, Version(self.version))
        except InvalidVersion:
            return (True, self.location)

    @cached_property
    def packages(self) -> frozenset[str]:
        """Names of the top-level packages and modules."""
        return frozenset(module.partition(".")[0] for module in (*self.sources, *self.compiled))

    def has_package(self, module: str) -> bool:
        """Return whether ``module`` is a module, a compiled module or a folder of modules."""
        return module in self._package_names

    @cached_property
    def _package_names(self) -> frozenset[str]:
        names: set[str] = set()
        for module in (*self.sources, *self.compiled):
            parts = module.split(".")
            names.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return frozenset(names)


def _archive_files(path: Path) -> Iterator[tuple[str, bytes | None]]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            is_wheel = any(name.endswith(".dist-info/METADATA") for name in names)
            for name in names:
                inner = name if is_wheel else name.partition("/")[2]
                if _is_read(inner):
                    yield _unprefixed(inner), None if _is_compiled(inner) else archive.read(name)
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                inner = member.name.partition("/")[2]
                if member.isfile() and _is_read(inner):
                    stream = archive.extractfile(member)
                    content = stream.read() if stream is not None else b""
                    yield _unprefixed(inner), None if _is_compiled(inner) else content
    except tarfile.TarError as error:
        raise ConfigError(
            f"{path}: is neither a wheel nor an sdist: {error}. Try: pip download again"
        ) from error


def _folder_files(folder: Path) -> Iterator[tuple[str, bytes | None]]:
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).as_posix()
        if _is_read(inner) and path.is_file():
            yield _unprefixed(inner), None if _is_compiled(inner) else path.read_bytes()


def _installed_files(
    distribution: Any,
) -> Iterator[tuple[str, bytes | None]]:
    files = list(distribution.files or ())
    # An editable installation lists a file with the path of the source folder, and no modules.
    for path in files:
        inner = path.as_posix()
        if inner.endswith(".pth") and "/" not in inner:
            for line in Path(str(path.locate())).read_text().splitlines():
                if line and not line.startswith("import") and Path(line).is_dir():
                    yield from _folder_files(Path(line))
    for path in files:
        inner = path.as_posix()
        if _is_read(inner) and not inner.startswith("..") and Path(str(path.locate())).is_file():
            content = None if _is_compiled(inner) else Path(str(path.locate())).read_bytes()
            yield inner, content


def _is_read(inner: str) -> bool:
    path = PurePosixPath(inner)
    if path.name in ("METADATA", "PKG-INFO"):
        return True
    if path.suffix not in (".py", *_COMPILED) or path.parts[0] in _OTHER_FOLDERS:
        return False
    # A folder such as `.venv` or `vllm-0.9.0` cannot be part of a module's name.
    folders = path.parts[:-1]
    return all(part.isidentifier() for part in folders) and path.name != "setup.py"


def _is_compiled(inner: str) -> bool:
    return inner.endswith(_COMPILED)


def _unprefixed(inner: str) -> str:
    """Return a path without the folder of a `src` layout, or `python` as in SGLang."""
    for prefix in ("src/", "python/"):
        inner = inner.removeprefix(prefix)
    return inner


def _module_name(inner: str) -> str:
    path = PurePosixPath(inner)
    parts = [*path.parts[:-1], path.name.partition(".")[0]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _from_file_name(label: str) -> tuple[str, str]:
    """Return name and version of a file or folder such as ``vllm-0.9.0.tar.gz``."""
    stem = re.sub(r"(\.tar\.\w+|\.tgz|\.zip|\.whl)$", "", label)
    name, _, rest = stem.partition("-")
    version = rest.partition("-")[0]
    if re.match(r"\d", version):
        return name, version
    return stem or label, ""


def _version_in(sources: Mapping[str, str]) -> str:
    """Return the version that a module such as ``vllm._version`` assigns, or ""."""
    for module in sorted(sources, key=len):
        is_version = module.rpartition(".")[2] in ("_version", "version")
        if module.count(".") <= 1 and is_version:
            found = _VERSION_ASSIGNMENT.search(sources[module])
            if found is not None:
                return found[1]
    for module, text in sources.items():
        if "." not in module and (found := _VERSION_ASSIGNMENT.search(text)):
            return found[1]
    return ""
