"""A shard of the trials of a verification, which runs in one child process at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import IO, Any

from interposer import Config
from interposer.errors import InterposerError, foreign_errors
from interposer_testing._checks.fault import Fault
from interposer_testing._trials.child import Child
from interposer_testing._trials.kernels import SeparateKernels
from interposer_testing._trials.outcome import Outcome, Scope, outcome_of, trials, untried
from interposer_testing._trials.trial import Trial

# Consecutive trials in the same shard, which share a case and the expected result.
_BLOCK = 16

Message = str | tuple[int, Outcome] | BaseException | None
"""A message of a shard: the name of a starting trial; the number and the outcome of a finished
trial; the error that stopped the shard; or None at the end."""


class Shard:
    """Every ``parts``-th block of trials, which runs in one child process at a time."""

    def __init__(self, request: dict[str, Any], part: int, parts: int) -> None:
        self._request = {**request, "part": part, "parts": parts}
        self._child: Child | None = None
        self._stopped = False

    def run(self, send: Callable[[Message], None], limit_seconds: float) -> None:
        """Run all trials of the shard; send every message, and None at the end.

        If the child process crashes in a trial, a new process continues after that trial.
        """
        first_position, crashed = 0, list[tuple[str, ...]]()
        try:
            while not self._stopped:
                running: tuple[int, int, Outcome] | None = None
                request = {
                    **self._request,
                    "first_position": first_position,
                    "crashed": crashed,
                }
                with Child(request, limit_seconds) as self._child:
                    if self._stopped:  # ``stop`` was called while the child started
                        return
                    for message in self._child.messages():
                        if "ended" in message:
                            return
                        number = message["number"]
                        if "begins" in message:
                            outcome = Outcome.from_dict(message["begins"])
                            running = number, message["position"], outcome
                            send(message["named"])
                            continue
                        running = None
                        send((number, Outcome.from_dict(message["outcome"])))
                if self._stopped:
                    return
                end, stderr = self._child.end, self._child.stderr
                if running is None:
                    send(InterposerError(f"A process that runs trials {end}. It said:\n{stderr}"))
                    return
                number, position, outcome = running
                first_position = position + 1
                crashed.append(outcome.candidate)
                fault = Fault("call", "process", end, traceback=stderr)
                send((number, replace(outcome, state="failed", faults=(fault,))))
        except foreign_errors() as error:  # this runs in a thread, where an error would be lost
            send(error)
        finally:
            send(None)

    def stop(self) -> None:
        """Kill the child process."""
        self._stopped = True
        if self._child is not None:
            self._child.stop()


def main() -> None:
    """Run the trials of a shard, in a child process that ``Isolation`` started."""
    from interposer import current_registry, place

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of kernels must not mix with the replies
    request = json.loads(sys.argv[1])
    config = Config(platform=request["platform"]) if request["platform"] else Config()
    registry, scope = current_registry(config), Scope(**request["scope"])
    crashed = set(map(tuple, request["crashed"]))
    placement, is_separate = place(config), request["is_separate"]
    part, parts = request["part"], request["parts"]
    with SeparateKernels(type(placement.platform)) if is_separate else nullcontext() as kernels:
        all_trials = trials(registry, placement.device, scope, kernels)
        of_shard = _of_shard(all_trials, part, parts, is_separate=is_separate)
        for position, (number, trial) in enumerate(of_shard):
            # Earlier trials ran before the crash.
            if position < request["first_position"]:
                continue
            outcome = untried(trial)
            if outcome.candidate in crashed:
                reason = "a trial before it ended the process"
                outcome = replace(outcome, state="not run", reason=reason)
            else:
                begins = {"begins": outcome.to_dict(), "position": position, "named": str(trial)}
                _reply(replies, number=number, **begins)
                outcome = outcome_of(trial)
                # The process of a kernel crashed, and this process goes on.
                if any(fault.where == "process" for fault in outcome.faults):
                    crashed.add(outcome.candidate)
            _reply(replies, number=number, outcome=outcome.to_dict())
    _reply(replies, ended=True)


def _of_shard(
    all_trials: Iterable[Trial], part: int, parts: int, *, is_separate: bool
) -> Iterator[tuple[int, Trial]]:
    """Yield (number among all trials, trial) for the trials of one shard.

    With ``is_separate``, all separable trials come first: the others import kernels into this
    process, which could then change how it judges.
    """
    deferred_trials = list[tuple[int, Trial]]()
    num_separable = num_others = 0
    for number, trial in enumerate(all_trials):
        if trial.is_separable or not is_separate:
            if num_separable // _BLOCK % parts == part:
                yield number, trial
            num_separable += 1
        else:
            if num_others // _BLOCK % parts == part:
                deferred_trials.append((number, trial))
            num_others += 1
    yield from deferred_trials


def _reply(replies: IO[str], **facts: Any) -> None:
    print(json.dumps(facts), file=replies, flush=True)
