"""The exceptions that interposer raises; every one carries its facts as attributes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

# Offered here with the rest of what errors take.
from interposer_sandbox import described as described
from interposer_sandbox import foreign_errors as foreign_errors
from interposer_sandbox import nearest_first as nearest_first
from interposer_sandbox import traced as traced

if TYPE_CHECKING:
    from interposer._contract.verdict import Refusal


_PUBLIC = "interposer.errors"
# Modules that a warning is not about: the SDK, and what its calls go through.
_PASSED = ("interposer", "contextlib", "functools", "pluggy", "torch.nn")


class InterposerError(Exception):
    """The root of all errors that interposer raises on purpose."""

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = _PUBLIC  # where users import it from, and tracebacks name it

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses are built from facts, but ``args`` holds the text: an error that crosses to
        # another process takes both along.
        return _restored, (type(self), self.args), self.__dict__


class ConfigError(InterposerError, ValueError):
    """A configuration key or value is not usable."""


class InstallationError(InterposerError, ImportError):
    """Files of what is installed, or a module in place of one, keep imports from working."""

    def __init__(self, faults: Iterable[str], mend: str) -> None:
        self.faults = tuple(faults)
        self.mend = mend
        lines = "\n  ".join(["What is installed cannot be imported.", *self.faults])
        super().__init__(f"{lines}\nTry: {mend}")


class LockError(ConfigError):
    """The installed plugins are not the locked ones, or the lock file cannot be used."""


class UnknownNameError(ConfigError):
    """A name is not among the known ones, which are listed nearest first.

    ``where`` says what the name was looked up in, such as ``"in Config.kernels"``.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], hint: str = "", where: str = ""
    ) -> None:
        self.kind = kind
        self.name = name
        self.known = nearest_first(name, known)
        self.hint = hint
        self.where = where
        listed = ", ".join(repr(k) for k in self.known) or "(none)"
        tail = f"\n{hint}" if hint else ""
        place = f" {where}" if where else ""
        super().__init__(
            f"Unknown {kind} {name!r:.200}{place}. Known, nearest first: {listed}.{tail}"
        )


class RankError(InterposerError, RuntimeError):
    """A rank died, hangs, or disagrees with the others; those that are left cannot go on.

    ``rank`` is the one that tells of it, ``lost`` are those that did not come, where that is known.
    """

    def __init__(self, rank: int, reason: str, lost: Iterable[int] = ()) -> None:
        self.rank = rank
        self.reason = reason
        self.lost = tuple(lost)
        super().__init__(f"Rank {rank}: {reason}")


class PluginError(InterposerError):
    """A plugin failed or declared something that cannot be used.

    ``trace`` is the traceback where its code failed in another process.
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
    """A record that a plugin declared contradicts itself or points nowhere."""


class GraphError(InterposerError):
    """A step could not be captured, though all that was chosen for it promised to be safe."""


class MissingMemberError(InterposerError, NotImplementedError):
    """An optional member of a platform or backend was used though it is not provided."""


class NoCandidateError(InterposerError):
    """Every candidate for a request was refused; ``refusals`` says why, one by one."""

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
    """No platform can be used, or the one that was asked for cannot."""


class _FileError(InterposerError):
    """Something is wrong with a file or a folder."""

    def __init__(self, path: object, reason: str, mend: str = "") -> None:
        self.path = str(path)
        self.reason = reason
        self.mend = mend
        tail = f"\nTry: {mend}" if mend else ""
        super().__init__(f"{self.path}: {reason}{tail}")


class CheckpointError(_FileError):
    """A model directory is incomplete, corrupt or contradicts its own config."""


class UnsupportedModelError(CheckpointError):
    """The architecture or a feature of the checkpoint has no implementation."""


class StorageError(_FileError):
    """A file that interposer keeps or reads is corrupt, foreign or not accessible."""


class RequestError(InterposerError, ValueError):
    """A generation request holds an unusable prompt or parameter."""


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that led here, whatever lies in between."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, category, frame.f_code.co_filename, frame.f_lineno, registry=registry
    )


def _restored(kind: type[InterposerError], args: tuple[object, ...]) -> InterposerError:
    return kind.__new__(kind, *args)
