"""Trials in a process of their own, so that native code that crashes or hangs is a fault of one.

The child tells of each trial before it runs and after; a crash goes to the account of the trial
that was running. Then another child goes on behind it, without the candidate that crashed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from tempfile import TemporaryFile
from threading import Timer
from typing import IO, Any

from interposer.capability import Device
from interposer.config import Config
from interposer.errors import ConfigError, InterposerError
from interposer.registry import Registry
from interposer.testing.fault import Fault
from interposer.testing.outcome import Outcome, Progress, Scope, outcome_of, trials, untried

__all__ = ["Isolation"]

_PROGRAM = "from interposer.testing.isolation import main; main()"
_MOST_CHARACTERS = 4000


class Isolation:
    """Runs the trials of a verification in child processes.

    Only installed plugins are found there.
    """

    def __init__(self, platform: str = "", limit_seconds: float = 600.0) -> None:
        """Say where children run, and how long a trial may take before it counts as hanging."""
        self._platform = platform
        self._limit_seconds = limit_seconds

    def __call__(
        self, registry: Registry, device: Device, scope: Scope, progress: Progress | None = None
    ) -> Iterator[Outcome]:
        """Yield what came of each trial; those after a crash of their candidate are not run.

        Raises: InterposerError: the plugin was given in code, or the child ended between trials.
        """
        if all(
            plugin.source.installed is None
            for plugin in registry.plugins.loaded
            if plugin.distribution == scope.distribution
        ):
            raise ConfigError(
                f"{scope.distribution} is not installed, so another process cannot find it. "
                "Try: install it, or leave out --isolate"
            )
        done, crashed = 0, list[tuple[str, ...]]()
        while True:
            running: Outcome | None = None
            request = {
                "scope": asdict(scope),
                "platform": self._platform,
                "done": done,
                "crashed": crashed,
            }
            with _Child(request, self._limit_seconds) as child:
                for told in child.messages():
                    if "ended" in told:
                        return
                    if "begins" in told:
                        running = Outcome.from_dict(told["begins"])
                        if progress is not None:
                            progress(done, told["named"])
                        continue
                    done, running = done + 1, None
                    yield Outcome.from_dict(told["outcome"])
            if running is None:
                raise InterposerError(
                    f"The process that runs the trials {child.end}. It said:\n{child.said}"
                )
            done += 1
            crashed.append(running.candidate)
            fault = Fault("call", "process", child.end, traceback=child.said)
            yield replace(running, state="failed", faults=(fault,))


class _Child:
    """A process that runs trials; a timer ends it where one takes too long.

    Attributes:
        end: how it ended.
        said: the end of what it wrote to standard error.
    """

    def __init__(self, request: dict[str, Any], limit_seconds: float) -> None:
        self._request = json.dumps(request)
        self._limit_seconds = limit_seconds
        self._hung = False
        self.end = self.said = ""

    def __enter__(self) -> _Child:
        self._open = ExitStack()
        self._errors = self._open.enter_context(TemporaryFile("w+", errors="replace"))
        self._process = self._open.enter_context(
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, self._request],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        )
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()  # it has ended, unless this process does not want to go on
        self.end = self._ended(self._process.wait())
        self._errors.seek(0)
        self.said = self._errors.read()[-_MOST_CHARACTERS:]
        self._open.close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what it tells, until it ends."""
        assert self._process.stdout is not None
        while True:
            watch = Timer(self._limit_seconds, self._stop)
            watch.start()
            line = self._process.stdout.readline()
            watch.cancel()
            if not line.endswith("\n"):  # half a line is what a dying process had to say
                self._process.wait()
                return
            yield json.loads(line)

    def _ended(self, code: int) -> str:
        if self._hung:
            return f"took more than {self._limit_seconds:g} s, and was ended"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"left with exit code {code}"

    def _stop(self) -> None:
        self._hung = True
        self._process.kill()


def main() -> None:
    """Run the trials that the command line asks for, in a process started by ``Isolation``."""
    from interposer.placement import place
    from interposer.registry import current_registry

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a kernel prints is no reply
    request = json.loads(sys.argv[1])
    config = Config(platform=request["platform"]) if request["platform"] else Config()
    registry, scope = current_registry(config), Scope(**request["scope"])
    crashed = set(map(tuple, request["crashed"]))
    for trial in islice(trials(registry, place(config).device, scope), request["done"], None):
        told = untried(trial)
        if told.candidate in crashed:
            reason = "a trial before it ended the process"
            _reply(replies, outcome=replace(told, state="not run", reason=reason).to_dict())
            continue
        _reply(replies, begins=told.to_dict(), named=str(trial))
        _reply(replies, outcome=outcome_of(trial).to_dict())
    _reply(replies, ended=True)


def _reply(replies: IO[str], **told: Any) -> None:
    print(json.dumps(told), file=replies, flush=True)
