"""A shard of the trials of a verification, which one process at a time runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import IO, Any

from interposer import Config
from interposer.errors import InterposerError, foreign_errors
from interposer_testing._checks.fault import Fault
from interposer_testing._trials.child import Child
from interposer_testing._trials.outcome import Outcome, Scope, outcome_of, trials, untried
from interposer_testing._trials.trial import Trial

# Of consecutive trials, which share arguments; few enough that every process gets its part.
_BLOCK = 16

Told = str | tuple[int, Outcome] | BaseException | None
"""The message of a shard: the name of a trial that begins, an outcome and its number among the
trials of all shards, the error that stopped the shard, or None at its end."""


class Shard:
    """The part of the trials that one process at a time runs."""

    def __init__(self, request: dict[str, Any], part: int, parts: int) -> None:
        self._request = {**request, "part": part, "parts": parts}
        self._child: Child | None = None
        self._stopped = False

    def run(self, tell: Callable[[Told], None], limit_seconds: float) -> None:
        """Tell of every trial of the shard, and at last that it has ended, or why it cannot go on.

        A process that crashes in a trial is followed by another.
        """
        first, crashed = 0, list[tuple[str, ...]]()
        try:
            while not self._stopped:
                running: tuple[int, Outcome] | None = None
                request = {**self._request, "first": first, "crashed": crashed}
                with Child(request, limit_seconds) as self._child:
                    if self._stopped:  # while it started
                        return
                    for message in self._child.messages():
                        if "ended" in message:
                            return
                        number = message["number"]
                        if "begins" in message:
                            running = number, Outcome.from_dict(message["begins"])
                            tell(message["named"])
                            continue
                        running = None
                        tell((number, Outcome.from_dict(message["outcome"])))
                if self._stopped:
                    return
                end, said = self._child.end, self._child.said
                if running is None:
                    tell(InterposerError(f"A process that runs trials {end}. It said:\n{said}"))
                    return
                number, told = running
                first = number + 1
                crashed.append(told.candidate)
                fault = Fault("call", "process", end, traceback=said)
                tell((number, replace(told, state="failed", faults=(fault,))))
        except foreign_errors() as error:  # of a thread, which nobody else would see
            tell(error)
        finally:
            tell(None)

    def stop(self) -> None:
        """End the process, if it has not ended yet."""
        self._stopped = True
        if self._child is not None:
            self._child.stop()


def main() -> None:
    """Run the trials that the command line asks for, in a process started by ``Isolation``."""
    from interposer import current_registry, place

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a kernel prints is no reply
    request = json.loads(sys.argv[1])
    config = Config(platform=request["platform"]) if request["platform"] else Config()
    registry, scope = current_registry(config), Scope(**request["scope"])
    crashed = set(map(tuple, request["crashed"]))
    everything = trials(registry, place(config).device, scope)
    for number, trial in _shared(everything, request["part"], request["parts"]):
        if number < request["first"]:
            continue
        told = untried(trial)
        if told.candidate in crashed:
            reason = "a trial before it ended the process"
            outcome = replace(told, state="not run", reason=reason)
        else:
            _reply(replies, number=number, begins=told.to_dict(), named=str(trial))
            outcome = outcome_of(trial)
        _reply(replies, number=number, outcome=outcome.to_dict())
    _reply(replies, ended=True)


def _shared(everything: Iterable[Trial], part: int, parts: int) -> Iterator[tuple[int, Trial]]:
    """Yield the trials of one part with their numbers among all."""
    for number, trial in enumerate(everything):
        if number // _BLOCK % parts == part:
            yield number, trial


def _reply(replies: IO[str], **told: Any) -> None:
    print(json.dumps(told), file=replies, flush=True)
