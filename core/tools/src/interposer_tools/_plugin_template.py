"""The template of new plugins, which ``interposer new plugin`` fills in."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import importlib_metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from interposer.errors import ConfigError, InterposerError, StorageError, install_command
from interposer.hookspecs import GROUP
from interposer.tooling import API_RANGE, STANDARD, entry_points

_TEMPLATE = Path(__file__).parent / "templates" / "plugin"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
# With a longer name, lines of the template would exceed the limit of the plugin's own linter.
_MAX_NAME_CHARACTERS = 50


class PluginKind(StrEnum):
    """The kinds of plugins that the template writes."""

    KERNEL = "kernel"
    ATTENTION = "attention"
    QUANTIZATION = "quantization"
    LAYER = "layer"
    MODEL = "model"
    PLATFORM = "platform"


class License(StrEnum):
    """The license of a new plugin."""

    APACHE = "Apache-2.0"
    BSD = "BSD-3-Clause"
    MIT = "MIT"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class NewPlugin:
    """A plugin package to write.

    Attributes:
        name: the normalised name of the distribution and the plugin; the package has the same name
            with underscores.
        author: the copyright holder; if empty, the license names "The authors of <name>".
        native: write the kernel in C; only for the kind ``kernel``.

    Raises:
        ConfigError: the name is invalid or taken in this environment, or ``native`` does not fit
            the kind.
    """

    name: str
    kind: PluginKind
    license: License = License.APACHE
    author: str = ""
    native: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _normalised(self.name))
        if self.native and self.kind is not PluginKind.KERNEL:
            raise ConfigError(
                f"Only kernels can be compiled, and a plugin of the kind {self.kind} has none.\n"
                f"Try: --kind {PluginKind.KERNEL} --native, or --kind {self.kind} alone"
            )
        if not self.author.isprintable():
            raise ConfigError(f"The author {self.author!r} is not one line of printable text")

    @property
    def package(self) -> str:
        """The name of the Python package: ``name`` with underscores."""
        return self.name.replace("-", "_")

    def write(self, folder: Path) -> Path:
        """Write the package into a new folder inside ``folder``, completely or not at all.

        Returns: the new folder.
        Raises:
            StorageError: the new folder exists, or cannot be written.
            InterposerError: copier is missing.
        """
        try:
            from copier import Settings, run_copy
        except ImportError as error:
            raise InterposerError(
                f"New plugins need the package copier, which cannot be imported: {error}\n"
                f"Try: {install_command('interposer-tools[new]')}"
            ) from error
        target = folder / self.name
        if target.exists() or target.is_symlink():
            remedy = "another name, another folder after --into, or remove it"
            raise StorageError(target, "exists already", remedy)
        if not folder.is_dir():
            raise StorageError(
                folder, "is not a directory", "make it, or name another after --into"
            )
        try:
            # In the same folder as the target, so that the rename is atomic.
            with TemporaryDirectory(dir=folder, prefix=f".{self.name}-") as temporary:
                package = Path(temporary, self.name)
                answers = self._answers()
                # Default settings: the user's copier settings must not change the result.
                run_copy(
                    str(_TEMPLATE), package, answers, settings=Settings(), defaults=True, quiet=True
                )
                package.rename(target)
        except OSError as error:
            raise StorageError(target, f"cannot be written: {error}") from error
        return target

    def _answers(self) -> dict[str, str | bool]:
        """Return the values of the template's variables, with the versions of the installed SDK."""
        distribution = importlib_metadata.distribution("interposer")
        major, minor = Version(distribution.version).release[:2]
        requirements = map(Requirement, distribution.requires or ())
        oldest = SpecifierSet(distribution.metadata["Requires-Python"])
        return {
            "name": self.name,
            "package": self.package,
            "kind": self.kind,
            "native": self.native,
            "license": self.license,
            "author": self.author,
            "holder": self.author or f"The authors of {self.name}",
            "year": str(datetime.now(UTC).year),
            "api": API_RANGE,
            # Before 1.0, a minor release of the SDK may change its interfaces.
            "sdk": f">={major}.{minor},<{f'{major}.{minor + 1}' if major == 0 else major + 1}",
            "torch": next(str(r.specifier) for r in requirements if r.name == "torch"),
            "python": next(s.version for s in oldest if s.operator == ">="),
        }


def _normalised(name: str) -> str:
    """Normalise the name of a new plugin as PEP 503 requires.

    Raises: ConfigError: the name is no valid name of a distribution and a package, or is taken.
    """
    normalised = str(canonicalize_name(name))
    if fault := _name_fault(name):
        remedy = _proposed_name(normalised)
        raise ConfigError(f"{name!r} cannot be the name of a new plugin: {fault}.\nTry: {remedy}")
    return normalised


def _name_fault(name: str) -> str:
    """Return the reason why a new plugin cannot have a name, or ""."""
    normalised = str(canonicalize_name(name))
    package = normalised.replace("-", "_")
    if not _NAME.fullmatch(name):
        return (
            "names consist of A-Z, a-z, 0-9, '.', '-' and '_', "
            "and begin and end with a letter or a digit"
        )
    if len(normalised) > _MAX_NAME_CHARACTERS:
        return f"it has {len(normalised)} characters, at most {_MAX_NAME_CHARACTERS} fit"
    if not package.isidentifier() or keyword.iskeyword(package):
        return f"Python cannot import a package {package!r}"
    if package in sys.stdlib_module_names:
        return f"{package!r} is a module of Python itself"
    if normalised in STANDARD:
        return "it is a part of the SDK"
    return _conflict(normalised, package)


def _conflict(name: str, package: str) -> str:
    """Describe the installed distribution, package or plugin that has this name, or return ""."""
    for distribution in importlib_metadata.distributions(name=name):
        return f"a distribution of this name is installed, version {distribution.version}"
    try:
        spec = find_spec(package)
    except ValueError:  # a module that compiled code put into sys.modules, without a spec
        return f"this process has a module {package!r} already"
    # The origin of a folder without __init__.py is None; the new package would hide such a folder.
    if spec is not None and spec.origin is not None:
        return f"there is a package {package!r} already, {spec.origin}"
    for point in entry_points(GROUP):
        if canonicalize_name(point.name) == name and point.dist is not None:
            return f"the installed {point.dist.name} has a plugin of this name"
    return ""


def _proposed_name(name: str) -> str:
    """Return a valid name that resembles ``name``."""
    max_characters = _MAX_NAME_CHARACTERS - len("-plugin")
    stem = re.sub("[^a-z0-9]+", "-", name).strip("-")[:max_characters].strip("-") or "acme-kernels"
    if not _name_fault(stem):
        return stem
    return f"{stem}-plugin" if stem.startswith("acme-") else f"acme-{stem}"
