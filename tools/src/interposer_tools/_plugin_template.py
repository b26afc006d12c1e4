"""The template of plugins: what ``interposer new plugin`` writes."""

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

from interposer.errors import ConfigError, InterposerError, StorageError
from interposer.hookspecs import GROUP
from interposer.tooling import API_RANGE, STANDARD, entry_points

_TEMPLATE = Path(__file__).parent / "templates" / "plugin"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
# So that no line of the template, where the name stands, gets longer than its linter allows.
_MOST_CHARACTERS = 50


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
    """A plugin that is to be written.

    Attributes:
        name: of the distribution, the plugin and, with underscores, the package; it is normalised.
        author: empty for one whose authors are known by its name only.
        native: its kernels are compiled, so it must be of the kind ``kernel``.

    Raises:
        ConfigError: the name cannot be used or is taken in this environment, or the kind has no
            kernels to compile.
    """

    name: str
    kind: PluginKind
    license: License = License.APACHE
    author: str = ""
    native: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _checked(self.name))
        if self.native and self.kind is not PluginKind.KERNEL:
            raise ConfigError(
                f"Kernels are what is compiled, and a plugin of the kind {self.kind} has none.\n"
                f"Try: --kind {PluginKind.KERNEL} --native, or --kind {self.kind} alone"
            )
        if not self.author.isprintable():
            raise ConfigError(f"The author {self.author!r} is not one line of printable text")

    @property
    def package(self) -> str:
        """The name under which it is imported."""
        return self.name.replace("-", "_")

    def write(self, folder: Path) -> Path:
        """Return the new folder of the plugin inside ``folder``; it appears complete or not at all.

        Raises:
            StorageError: it exists, or cannot be written.
            InterposerError: copier is missing.
        """
        try:
            from copier import Settings, run_copy
        except ImportError as error:
            raise InterposerError(
                f"A plugin is written by copier, which cannot be used: {error}\n"
                "Try: pip install 'interposer-tools[new]'"
            ) from error
        target = folder / self.name
        if target.exists() or target.is_symlink():
            mend = "another name, another folder after --into, or remove it"
            raise StorageError(target, "exists already", mend)
        if not folder.is_dir():
            raise StorageError(
                folder, "is not a directory", "make it, or name another after --into"
            )
        try:
            # Beside its target, where renaming it is one step.
            with TemporaryDirectory(dir=folder, prefix=f".{self.name}-") as temporary:
                written = Path(temporary, self.name)
                answers = self._answers()
                # The settings of the user's own templates do not count.
                run_copy(
                    str(_TEMPLATE), written, answers, settings=Settings(), defaults=True, quiet=True
                )
                written.rename(target)
        except OSError as error:
            raise StorageError(target, f"cannot be written: {error}") from error
        return target

    def _answers(self) -> dict[str, str | bool]:
        """Return the answers to the questions of the template, from what is installed."""
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
            "sdk": f">={major}.{minor},<{f'{major}.{minor + 1}' if major == 0 else major + 1}",
            "torch": next(str(r.specifier) for r in requirements if r.name == "torch"),
            "python": next(s.version for s in oldest if s.operator == ">="),
        }


def _checked(name: str) -> str:
    """Return a name as PEP 503 normalises it.

    Raises: ConfigError: it cannot be the name of a distribution and a package, or is taken.
    """
    normalised = str(canonicalize_name(name))
    package = normalised.replace("-", "_")
    if not _NAME.fullmatch(name):
        reason = (
            "names consist of A-Z, a-z, 0-9, '.', '-' and '_', "
            "and begin and end with a letter or a digit"
        )
    elif len(normalised) > _MOST_CHARACTERS:
        reason = f"it has {len(normalised)} characters, at most {_MOST_CHARACTERS} fit"
    elif not package.isidentifier() or keyword.iskeyword(package):
        reason = f"Python cannot import a package {package!r}"
    elif package in sys.stdlib_module_names:
        reason = f"{package!r} is a module of Python itself"
    elif normalised in STANDARD:
        reason = "it is a part of the SDK"
    else:
        reason = _taken(normalised, package)
    if reason:
        mend = _free(normalised)
        raise ConfigError(f"{name!r} cannot be the name of a new plugin: {reason}.\nTry: {mend}")
    return normalised


def _taken(name: str, package: str) -> str:
    """Return by what in this environment a name is taken, or nothing."""
    for found in importlib_metadata.distributions(name=name):
        return f"a distribution of this name is installed, version {found.version}"
    try:
        spec = find_spec(package)
    except ValueError:  # a module that compiled code put into sys.modules, without a spec
        return f"this process has a module {package!r} already"
    if spec is not None and spec.origin is not None:  # None where it is a mere folder
        return f"there is a package {package!r} already, {spec.origin}"
    for point in entry_points(GROUP):
        if canonicalize_name(point.name) == name and point.dist is not None:
            return f"the installed {point.dist.name} has a plugin of this name"
    return ""


def _free(name: str) -> str:
    """Return a name like ``name`` that can be used, as a proposal."""
    stem = re.sub("[^a-z0-9]+", "-", name).strip("-")[: _MOST_CHARACTERS - 5].strip("-")
    return f"acme-{stem or 'kernels'}"
