"""The task of a sandbox, which is a function: its finding and the report of its progress."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from interposer_sandbox._foreign import described, foreign_errors, traced

if TYPE_CHECKING:
    from interposer_sandbox._side_effects import SideEffects


class RefusedError(Exception):
    """A function refuses the code that it runs; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a function; its texts are made fit to be shown, whoever wrote them.

    Attributes:
        facts: JSON values that were noted on the way, also if the function did not end: the name
            of a ``missing`` module; the seconds that were not enough as ``limit_seconds``;
            ``passing`` where something outside of the code may have ended it.
        span: start and end in nanoseconds since the epoch, for whoever found it just now.
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
        """Say whether a finding of another time counts; a refusal whose cause is gone does not.

        Such a cause is a limit that was lower than ``seconds``, or a module that was missing.
        """
        limit, missing = self.facts.get("limit_seconds"), self.facts.get("missing")
        if self.accepted:
            return True
        if isinstance(limit, int | float) and limit < seconds:
            return False
        return not (isinstance(missing, str) and _is_installed(missing.partition(".")[0]))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON, without its span."""
        told = {"accepted": self.accepted, "reason": self.reason, "traceback": self.traceback}
        return {**told, "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, value: Any) -> Finding:
        """Return the finding that ``to_json`` was made of.

        Raises: ValueError: it was not made by ``to_json``.
        """
        kinds = {"accepted": bool, "reason": str, "traceback": str, "facts": dict}
        if not isinstance(value, dict) or {name: type(value[name]) for name in value} != kinds:
            raise ValueError("it is no finding")
        return cls(**value)

    @classmethod
    def accept(cls, reason: str = "") -> Finding:
        """Return an acceptance."""
        return cls(True, reason)

    @classmethod
    def refuse(cls, reason: str, trace: str = "", **facts: Any) -> Finding:
        """Return a refusal."""
        return cls(False, reason, trace, facts)

    @classmethod
    def raised(cls, stage: str, error: BaseException) -> Finding:
        """Return the refusal of code that raised while ``stage``."""
        # By its type: what it says of its class itself may be anything.
        missing = error.name if issubclass(type(error), ModuleNotFoundError) else None  # type: ignore[attr-defined]
        # A missing part of a package may be the code's own; then only another version mends it.
        facts = {"missing": missing} if type(missing) is str and "." not in missing else {}
        return cls.refuse(f"{stage} raised {described(error)}", traced(error), **facts)


class Reporter:
    """Notes how far a function has come, so that somebody knows if it does not come back.

    Attributes:
        alone: nothing but the function runs in this process.
        stage: what is being done, as in "importing acme.plugin".
        facts: hold whatever comes next.
    """

    alone = False

    def __init__(self) -> None:
        self.stage = "starting"
        self.facts: dict[str, Any] = {}

    def begin(self, stage: str, patience: float = 1.0) -> None:
        """Begin a stage, which may take ``patience`` times the usual limit."""
        self.stage = stage

    def note(self, **facts: Any) -> None:
        """Add to the facts."""
        self.facts |= facts

    def unmute(self) -> None:
        """Let code that runs from here on print; in a fork it may not before."""

    def run(self, stage: str, watch: SideEffects, action: Callable[..., Any], *given: Any) -> Any:
        """Return what ``action`` returns, as a stage; what it raises is passed on.

        Raises: RefusedError: it did something beside its work.
        """
        self.begin(stage)
        with watch:
            returned = action(*given)
        if watch.effects:
            raise RefusedError("; ".join(f"{stage} {effect}" for effect in watch.effects))
        return returned


Function = Callable[[Mapping[str, Any], Reporter], Finding]
"""A function for a sandbox, given JSON values by name; it is defined at the top of a module."""


def run_here(
    function: Function, arguments: Mapping[str, Any], reporter: Reporter | None = None
) -> Finding:
    """Run a function in this process and return what it found.

    What the code in it raises becomes a refusal; a crash or a hang does not.
    """
    reporter = reporter or Reporter()
    try:
        finding = function(arguments, reporter)
    except RefusedError as error:
        finding = Finding.refuse(str(error))
    except foreign_errors() as error:
        finding = Finding.raised(reporter.stage, error)
    return replace(finding, facts={**reporter.facts, **finding.facts})


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, ImportError):
        return False


def _fit(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``, with what does not print escaped."""
    shown = text[: limit + 1]
    if not shown.replace("\n", "").replace("\t", "").isprintable():  # which is rare, and slow
        shown = "".join(
            letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
            for letter in shown
        )
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
