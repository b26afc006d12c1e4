"""The border between the quick and the process tier of the tests, as a pytest plugin.

A test without the mark ``process`` (or one that runs elsewhere than in ``make test``) must neither
start a process, fork, sleep nor open a socket: whoever tries gets a ``TierError``, and the test
fails even where the code under test swallows that error.
"""

from __future__ import annotations

import functools
import multiprocessing.util
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from tests.forks import Forks

from interposer_sandbox import Sandbox

__all__ = ["TierError", "is_quick"]

# Audit events of Python, see "Audit events table" in its documentation.
_FORBIDDEN_EVENTS = {
    "os.exec": "replaces the process",
    "os.fork": "forks",
    "os.forkpty": "forks",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "socket.bind": "binds a socket",
    "socket.connect": "connects a socket",
    "subprocess.Popen": "starts a process",
}
# Each of these marks keeps a test out of the quick tier.
_OTHER_TIERS = ("process", "slow", "foreign", "gpu", "versions", "vllm")
_SLEEP = time.sleep
_MESSAGE = "a test of the quick tier {}; mark it with `process`"


class TierError(RuntimeError):
    """A test of the quick tier did what only the process tier may do."""


class _Border:
    """What the running test of the quick tier has done that is forbidden there."""

    def __init__(self) -> None:
        self.is_guarding = False
        self.violations: list[str] = []

    def refuse(self, action: str) -> None:
        """Record the action and raise ``TierError`` if the running test is of the quick tier."""
        if self.is_guarding:
            # The code under test may swallow the error, so the report shows the call as well.
            calls = "".join(traceback.format_stack()[-12:-1])
            self.violations.append(f"{_MESSAGE.format(action)}\n{calls}")
            raise TierError(_MESSAGE.format(action))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_guarding and event in _FORBIDDEN_EVENTS:
            self.refuse(_FORBIDDEN_EVENTS[event])

    def guard(self, owner: object, name: str, action: str) -> None:
        """Refuse a function in the quick tier that raises no audit event."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def guarded(*arguments: Any, **keywords: Any) -> Any:
            # time.sleep(0) lets another thread run.
            if function is not _SLEEP or arguments[0] > 0:
                self.refuse(action)
            return function(*arguments, **keywords)

        setattr(owner, name, guarded)


_border = _Border()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "process: starts processes or servers, forks, sleeps or opens sockets"
    )
    sys.addaudithook(_border.audit)
    _border.guard(time, "sleep", "sleeps")
    _border.guard(socket.socket, "listen", "listens on a socket")
    _border.guard(multiprocessing.util, "spawnv_passfds", "starts a process")
    # These two reach a process that an earlier test may have started.
    _border.guard(Sandbox, "run", "runs code in a sandbox process")
    _border.guard(Forks, "command", "forks a process")


def is_quick(item: pytest.Item) -> bool:
    """Say whether a test is of the quick tier."""
    return not any(map(item.get_closest_marker, _OTHER_TIERS))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _border.is_guarding = is_quick(item)
    try:
        return (yield)
    finally:
        _border.is_guarding = False


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    violations, _border.violations = _border.violations, []
    if violations:
        pytest.fail("\n".join(violations), pytrace=False)
