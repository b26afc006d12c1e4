"""A sandboxed function's finding and progress reports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from interposer_sandbox._foreign import described, foreign_errors, traced

if TYPE_CHECKING:
    from interposer_sandbox._side_effects import SideEffects


class RefusedError(Exception):
    """A sandboxed function refuses the examined code; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a sandboxed function; unprintable characters of texts are escaped.

    Attributes:
        facts: JSON values that the function noted, even if the function did not return. A refusal
            may add the name of a ``missing`` module, the exceeded limit as ``limit_seconds``, or
            ``passing`` if a cause outside the code may have ended the process.
        span: start and end in nanoseconds since the epoch; None for a stored finding.
    """

    accepted: bool
    reason: str = ""
    traceback: str = field(default="", repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict)
    span: tuple[int, int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.accepted and not self.reason:
            raise ValueError("a refusal needs a reason")
        object.__setattr__(self, "reason", _fit(self.reason, 2_000))
        object.__setattr__(self, "traceback", _fit(self.traceback, 32_000))

    def __bool__(self) -> bool:
        return self.accepted

    def stands(self, seconds: float) -> bool:
        """Tell whether an earlier finding is still valid under a time limit of ``seconds``.

        A refusal is no longer valid if the limit was lower than ``seconds``, or if the missing
        module is now installed.
        """
        limit, missing = self.facts.get("limit_seconds"), self.facts.get("missing")
        if self.accepted:
            return True
        if isinstance(limit, int | float) and limit < seconds:
            return False
        return not (isinstance(missing, str) and _is_installed(missing.partition(".")[0]))

    def to_json(self) -> dict[str, Any]:
        """Return verdict, reason, traceback and facts of the finding as JSON values."""
        fields = {"accepted": self.accepted, "reason": self.reason, "traceback": self.traceback}
        return {**fields, "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, value: Any) -> Finding:
        """Restore a finding from the values of ``to_json``.

        Raises: ValueError: ``value`` is no finding.
        """
        kinds = {"accepted": bool, "reason": str, "traceback": str, "facts": dict}
        if not isinstance(value, dict) or {name: type(value[name]) for name in value} != kinds:
            raise ValueError("it is no finding")
        return cls(**value)

    @classmethod
    def accept(cls, reason: str = "") -> Finding:
        """Create a finding that accepts the code."""
        return cls(True, reason)

    @classmethod
    def refuse(cls, reason: str, trace: str = "", **facts: Any) -> Finding:
        """Create a finding that refuses the code."""
        return cls(False, reason, trace, facts)

    @classmethod
    def raised(cls, stage: str, error: BaseException) -> Finding:
        """Create a refusal of code that raised ``error`` during ``stage``."""
        # By its type, because the error's __class__ may lie.
        missing = error.name if issubclass(type(error), ModuleNotFoundError) else None  # type: ignore[attr-defined]
        # A missing submodule may belong to the code itself, which no other installation can add.
        facts = {"missing": missing} if type(missing) is str and "." not in missing else {}
        return cls.refuse(f"{stage} raised {described(error)}", traced(error), **facts)


class Reporter:
    """Records the progress of a function, for a report if the function does not return.

    Attributes:
        alone: this process runs only the function.
        stage: the current stage, as in "importing acme.plugin".
        facts: JSON values that become part of the finding, even if the function fails later.
    """

    alone = False

    def __init__(self) -> None:
        self.stage = "starting"
        self.facts: dict[str, Any] = {}

    def begin(self, stage: str, patience: float = 1.0) -> None:
        """Begin a stage, which may take ``patience`` times the usual limit."""
        self.stage = stage

    def note(self, **facts: Any) -> None:
        """Add facts to the finding."""
        self.facts |= facts

    def unmute(self) -> None:
        """Allow printing from here on; in a fork, earlier output is a reason for refusal."""

    def fork(self, work: Callable[[], object]) -> int:
        """Run ``work`` in a fork of this process, which cannot report, and return its process id.

        From here on, the signs of life of this process are those of the fork. If ``work`` returns
        true, the fork waits for its threads, and calls its exit functions.

        Raises: NotImplementedError: this process does not run the function alone.
        """
        raise NotImplementedError("only a process that runs one function can fork")

    def join(self, pid: int) -> None:
        """Wait for a fork to end; if its ``work`` did not return, end this process the same way."""
        raise NotImplementedError("only a process that runs one function can fork")

    def run(
        self, stage: str, watch: SideEffects, action: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Run ``action`` as a stage and return the result; exceptions are passed on.

        Raises: RefusedError: the action had side effects.
        """
        self.begin(stage)
        with watch:
            returned = action(*arguments)
        if watch.effects:
            raise RefusedError("; ".join(f"{stage} {effect}" for effect in watch.effects))
        return returned


Function = Callable[[Mapping[str, Any], Reporter], Finding]
"""A function for a sandbox: defined at the top of a module, with JSON values by name."""


def run_here(
    function: Function, arguments: Mapping[str, Any], reporter: Reporter | None = None
) -> Finding:
    """Run a function in this process and return its finding.

    An exception in the function becomes a refusal; a crash or a hang affects this process.
    """
    reporter = reporter or Reporter()
    try:
        finding = function(arguments, reporter)
    except RefusedError as error:
        finding = Finding.refuse(str(error))
    except foreign_errors() as error:
        finding = Finding.raised(reporter.stage, error)
    # Facts noted on the way are kept even if the function raised.
    return replace(finding, facts={**reporter.facts, **finding.facts})


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, ImportError):
        return False


def _fit(text: str, limit: int) -> str:
    """Truncate ``text`` to ``limit`` characters, with unprintable characters escaped."""
    printable = text[: limit + 1]
    if not printable.replace("\n", "").replace("\t", "").isprintable():  # rare, and slow to fix
        printable = "".join(
            letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
            for letter in printable
        )
    return printable if len(printable) <= limit else f"{printable[:limit]}..."
