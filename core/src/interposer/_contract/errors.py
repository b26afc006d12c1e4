"""The exceptions that interposer raises; each has attributes as well as a text."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

# Re-exported: modules import everything that errors need from here.
from interposer_sandbox import described as described
from interposer_sandbox import foreign_errors as foreign_errors
from interposer_sandbox import near_names as near_names
from interposer_sandbox import nearest_first as nearest_first
from interposer_sandbox import traced as traced

if TYPE_CHECKING:
    from interposer._contract.verdict import Refusal


_PUBLIC = "interposer.errors"
# A warning names the innermost frame outside these modules, which is the user's code.
_LISTING_COMMANDS = {
    "op": "interposer ops",
    "distribution": "interposer doctor",
    "platform": "interposer doctor",
    **dict.fromkeys(
        ("layer id", "attention type", "quantization method", "architecture", "collective"),
        "interposer explain",
    ),
}
_SKIPPED_MODULES = ("interposer", "contextlib", "functools", "pluggy", "torch.nn")


class InterposerError(Exception):
    """Base class of all errors that interposer raises on purpose."""

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = _PUBLIC  # tracebacks then name the module that users import

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors of subclasses take facts, but ``args`` holds the text. Pickling by ``args``
        # alone would call the constructor with the text, so text and attributes are both sent.
        return _restored, (type(self), self.args), self.__dict__


class ConfigError(InterposerError, ValueError):
    """A configuration key or value cannot be used."""


class InstallationError(InterposerError, ImportError):
    """Installed files, or a module that shadows an installed file, prevent an import."""

    def __init__(self, faults: Iterable[str], mend: str) -> None:
        self.faults = tuple(faults)
        self.mend = mend
        lines = "\n  ".join(["Installed packages cannot be imported.", *self.faults])
        super().__init__(f"{lines}\nTry: {mend}")


class LockError(ConfigError):
    """The installed plugins differ from the lock file, or the lock file cannot be used."""


class UnknownNameError(ConfigError):
    """A name is unknown; ``known`` lists the known names, nearest first.

    The text suggests three of them. ``where`` says in which place the name appeared, such as
    ``"in Config.kernels"``.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], hint: str = "", where: str = ""
    ) -> None:
        self.kind = kind
        self.name = name
        self.known = nearest_first(name, known)
        self.hint = hint
        self.where = where
        listed = f"Known, nearest first: {near_names(name, self.known)}"
        if kind in _LISTING_COMMANDS and listed.endswith(" more"):
            listed += f": `{_LISTING_COMMANDS[kind]}` lists all"
        if not self.known:
            listed = f"There is no {kind}"
        tail = f"\n{hint}" if hint else ""
        place = f" {where}" if where else ""
        super().__init__(f"Unknown {kind} {name!r:.200}{place}. {listed}.{tail}")


class RankError(InterposerError, RuntimeError):
    """A rank died, hangs, or disagrees with the others, so the remaining ranks cannot go on.

    ``rank`` is the rank that reports the error; ``lost`` are the missing ranks, as far as known.
    """

    def __init__(self, rank: int, reason: str, lost: Iterable[int] = ()) -> None:
        self.rank = rank
        self.reason = reason
        self.lost = tuple(lost)
        super().__init__(f"Rank {rank}: {reason}")


class PluginError(InterposerError):
    """A plugin failed, or declared something unusable.

    ``trace`` is the traceback if the plugin's code failed in another process.
    """

    def __init__(
        self, plugin: str, distribution: str, reason: str, mend: str = "", trace: str = ""
    ) -> None:
        self.plugin = plugin
        self.distribution = distribution
        self.reason = reason
        self.mend = mend
        self.trace = trace
        tail = f"\nTry: {mend}" if mend else ""
        super().__init__(f"Plugin {plugin!r} of {distribution}: {reason}{tail}")


class PluginConflictError(PluginError):
    """Two plugins claim one name, so neither can be used."""


class RecordError(InterposerError):
    """A plugin's record is contradictory, or names a missing object."""


class GraphError(InterposerError):
    """A step could not be captured, although all chosen candidates promised ``graph_safe``."""


class MissingMemberError(InterposerError, NotImplementedError):
    """A caller used an optional member that this platform or backend does not provide."""


class NoCandidateError(InterposerError):
    """Every candidate for a request was refused; ``refusals`` has the reason of each."""

    def __init__(self, what: str, refusals: Iterable[Refusal], action: str = "") -> None:
        self.what = what
        self.refusals = tuple(refusals)
        self.action = action
        lines = [f"No {what}."]
        lines += [f"  {refusal}" for refusal in self.refusals]
        if not self.refusals:
            lines.append("  No installed plugin declares one.")
        if action:
            lines.append(f"Try: {action}")
        super().__init__("\n".join(lines))


class PlatformUnavailableError(NoCandidateError):
    """No platform can be used, or the requested platform cannot."""


class _FileError(InterposerError):
    """Base of errors about a file or a folder."""

    def __init__(self, path: object, reason: str, mend: str = "") -> None:
        self.path = str(path)
        self.reason = reason
        self.mend = mend
        tail = f"\nTry: {mend}" if mend else ""
        super().__init__(f"{self.path}: {reason}{tail}")


class CheckpointError(_FileError):
    """A model directory is incomplete or corrupt, or its files contradict its config.json."""


class UnsupportedModelError(CheckpointError):
    """The architecture or a feature of the checkpoint has no implementation."""


class StorageError(_FileError):
    """A file that interposer stores or reads is corrupt, foreign or not accessible."""


class RequestError(InterposerError, ValueError):
    """A generation request has an unusable prompt or parameter."""


class ContextLengthError(RequestError):
    """A request has more tokens than the model or its cache takes."""


def warn(text: str, category: type[Warning]) -> None:
    """Issue a warning that names the line of the user's code that led to the call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        _SKIPPED_MODULES
    ):
        frame = frame.f_back
    # The registry of the named module, so that filters such as "once per location" work as usual.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, category, frame.f_code.co_filename, frame.f_lineno, registry=registry
    )


def install_command(package: str, options: str = "") -> str:
    """Return the command that installs a package, as the next action of an error.

    Args:
        package: name of a distribution, also with extras, such as ``"interposer-tools[new]"``.
        options: options of pip, such as ``"--upgrade"``.
    """
    name = package.partition("[")[0]
    words = ["pip install", options, shlex.quote(package)]
    if name != "interposer" and not name.startswith("interposer-"):
        return " ".join(filter(None, words))
    # No package index has the distributions of the SDK, so pip must find their wheels.
    words.insert(2, "--find-links dist")
    return f"{' '.join(filter(None, words))} (`make wheels` builds dist; see docs/install.md)"


def _restored(kind: type[InterposerError], args: tuple[object, ...]) -> InterposerError:
    return kind.__new__(kind, *args)
