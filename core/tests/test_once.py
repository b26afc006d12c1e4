"""What is remembered is computed once, whichever threads and processes ask."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from interposer import Config, current_registry, place
from interposer_sandbox import cached

_FORK = """
import os, signal, threading
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
    signal.alarm(20)  # ends a child that waits
    os._exit(number("quick"))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
release.set()
thread.join()
print(code)
"""


def test_threads_that_ask_at_once_share_one_call() -> None:
    calls = []

    @cached
    def slow(argument: int) -> object:
        calls.append(argument)
        time.sleep(0.05)
        return object()

    barrier = Barrier(8)

    def ask(_: int) -> object:
        barrier.wait()
        return slow(1)

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, range(8)))
    assert (len(found), calls) == (1, [1])


def test_a_failure_is_tried_again() -> None:
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


def test_discovery_and_placement_happen_once_for_all_threads() -> None:
    # Two names of one plugin, so that no other test has asked for this registry before.
    config = Config(platform="cpu", disable=frozenset({"example-norm", "interposer-example-norm"}))
    barrier = Barrier(8)

    def ask(_: int) -> tuple[int, int]:
        barrier.wait()
        return id(current_registry(config)), id(place(config))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs os.fork")
def test_a_process_forked_during_a_call_does_not_wait_for_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "7"
