"""What is remembered is computed once, whichever threads and processes ask."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, get_ident

import pytest
from tests.waiting import WAIT_SECONDS, wait_until

from interposer import Config, current_registry, place
from interposer_sandbox import cached

_FORK = """
import os, signal, sys, threading
from interposer_sandbox import cached

entered, release = threading.Event(), threading.Event()

@cached
def number(argument):
    if argument == "slow":
        entered.set()
        release.wait()
    return 7

thread = threading.Thread(target=number, args=("slow",))
thread.start()
entered.wait()
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[1]))  # ends a child that waits
    os._exit(number("quick"))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
release.set()
thread.join()
print(code)
"""


def is_in_cached(thread: int) -> bool:
    """Return whether a thread is in a call of a cached function, or waits for its lock."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not cached.__call__.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.process
def test_concurrent_threads_share_one_call() -> None:
    calls, callers = [], []
    release = Event()

    @cached
    def slow(argument: int) -> object:
        calls.append(argument)
        release.wait()
        return object()

    def ask() -> object:
        callers.append(get_ident())
        return slow(1)

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(ask) for _ in range(8)]
        try:
            # The first caller returns only after the others have asked.
            wait_until(lambda: sum(map(is_in_cached, callers)) == 8, "eight callers")
        finally:
            release.set()
    assert len({result.result() for result in results}) == 1
    assert calls == [1]


def test_a_failed_call_is_repeated() -> None:
    answers: Iterator[ValueError | int] = iter([ValueError("not yet"), 3])

    @cached
    def flaky() -> int:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    with pytest.raises(ValueError, match="not yet"):
        flaky()
    assert (flaky(), flaky()) == (3, 3)


@pytest.mark.process
def test_discovery_and_placement_happen_once_for_all_threads() -> None:
    # Two names of one plugin, so that no other test has asked for this registry before.
    config = Config(platform="cpu", disable=frozenset({"example-norm", "interposer-example-norm"}))
    barrier = Barrier(8)

    def ask(_: int) -> tuple[int, int]:
        barrier.wait()
        return id(current_registry(config)), id(place(config))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="needs os.fork")
def test_a_process_forked_during_a_call_does_not_wait_for_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORK, str(int(WAIT_SECONDS))]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "7"
