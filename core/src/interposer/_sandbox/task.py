"""The vocabulary of an examination: its task, its finding and the report of its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from interposer._contract.capability import Capability
from interposer._contract.errors import described, traced
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict

TaskName = Literal["plugin", "target", "platform", "predicate", "kernel"]


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to find out about a distribution's code.

    Attributes:
        name: what is done.

            - ``plugin`` imports ``value``, ``"package.plugin"`` or ``"package.plugin:attribute"``,
              of the entry point ``name``, takes its records and checks them.
            - ``target`` loads every import string in ``targets``.
            - ``platform`` loads the class ``target``, probes with it and lists its devices.
            - ``predicate`` asks ``target``, or its attribute ``member``, about ``request``.
            - ``kernel`` compares ``target``, with ``prepare``, to the reference of ``op`` for
              ``dtype`` and ``dims`` on ``device``. ``plugin`` and ``kernel`` name the record
              whose requirements choose the cases; ``platform`` and ``capability`` are what those
              are judged for.
        arguments: JSON values by name.
    """

    name: TaskName
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.name not in get_args(TaskName):
            raise ValueError(f"{self.name!r} is no task; those are {', '.join(get_args(TaskName))}")


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on a task; its texts are made fit to be shown, whoever wrote them.

    Attributes:
        facts: JSON values that were found on the way, also if the task did not end:
            ``platforms`` that a plugin declares, each with ``name`` and ``score``; the name of a
            ``missing`` module; the ``probe_seconds`` that were not enough as ``limit_seconds``;
            ``times_late`` if it took too long twice in a row; ``passing`` where something
            outside of the plugin may have ended it; ``unavailable`` where no process could.
        span: start and end in nanoseconds since the epoch, if it was found just now.
    """

    verdict: Verdict
    facts: Mapping[str, Any] = field(default_factory=dict)
    span: tuple[int, int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        told = self.verdict
        reason, trace = _fit(told.reason, 2_000), _fit(told.traceback, 32_000)
        object.__setattr__(self, "verdict", Verdict(told.accepted, reason, trace))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON, without its span."""
        return {**asdict(self.verdict), "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, value: Any) -> Finding:
        """Return the finding that ``to_json`` was made of.

        Raises: ValueError: it was not made by ``to_json``.
        """
        kinds = {"accepted": bool, "reason": str, "traceback": str, "facts": dict}
        if not isinstance(value, dict) or {name: type(value[name]) for name in value} != kinds:
            raise ValueError("it is no finding")
        return cls(Verdict(value["accepted"], value["reason"], value["traceback"]), value["facts"])

    @classmethod
    def refused(cls, reason: str, trace: str = "", **facts: Any) -> Finding:
        """Return a refusal."""
        return cls(Verdict.refuse(reason, trace), facts)

    @classmethod
    def raised(cls, stage: str, error: BaseException) -> Finding:
        """Return the refusal of code that raised while ``stage``."""
        trace = traced(error)
        # By its type: what it says of its class itself may be anything.
        missing = error.name if issubclass(type(error), ModuleNotFoundError) else None  # type: ignore[attr-defined]
        # A missing part of a package may be the plugin's own; then only another version mends it.
        facts = {"missing": missing} if type(missing) is str and "." not in missing else {}
        return cls.refused(f"{stage} raised {described(error)}", trace, **facts)


class Reporter:
    """Notes how far a task has come, so that somebody knows if it does not come back.

    Attributes:
        alone: nothing but the task runs in this process.
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
        """Let code that runs from here on print."""


def read_request(value: Mapping[str, Any]) -> Request:
    """Return the request that ``Request.to_json`` was called on."""
    capability, detail = Capability.from_json(value["capability"]), value["detail"]
    if detail is not None:
        # Imported here, as it needs torch, which few requests do.
        from interposer._contract.attention import AttentionSpec

        detail = AttentionSpec.from_json(detail)
    return Request(**{**value, "capability": capability, "detail": detail})


def _fit(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``, with what does not print escaped."""
    shown = "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
        for letter in text[: limit + 1]
    )
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
