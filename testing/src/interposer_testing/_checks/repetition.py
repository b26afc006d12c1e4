"""The checks that a kernel repeats its result: in a row, and in many threads at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

from interposer_testing._checks.call import Call, Given, Subject, differences
from interposer_testing._checks.exemplar import Exemplar
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault

_RUNS = 5
_THREADS = 8
_CALLS = 4
_SWITCH_SECONDS = 1e-5


def check_determinism(subject: Subject, exemplar: Exemplar) -> list[Fault]:
    """Return where five runs on equal arguments in other memory differ in a bit."""
    case, mutates = exemplar.build(), subject.op.mutates
    first = subject.call(subject.given(case)).values(mutates)
    for run in range(2, _RUNS + 1):
        again = subject.call(subject.given(case)).values(mutates)
        if found := list(differences(first, again)):
            return [
                Fault("determinism", where, f"runs 1 and {run} gave {how}") for where, how in found
            ]
    return []


def check_threads(subject: Subject, exemplar: Exemplar) -> list[Fault]:
    """Return what goes wrong when eight threads call the kernel at once, each on its own numbers.

    What is ``deterministic``, and computes the same bits twice alone, must do so here; anything
    else must stay within the op's bound.
    """
    op = subject.op
    cases = [exemplar.build(number) for number in range(_THREADS)]
    alone, again = ([subject.call(subject.given(case)) for case in cases] for _ in range(2))
    repeats = "deterministic" in subject.properties and not any(
        list(differences(one.values(op.mutates), other.values(op.mutates)))
        for one, other in zip(alone, again, strict=True)
    )
    given = [[subject.given(case) for _ in range(_CALLS)] for case in cases]
    barrier = Barrier(_THREADS)

    def work(mine: list[Given]) -> list[Call]:
        barrier.wait()
        return [subject.call(one) for one in mine]

    with _frequent_switches(), ThreadPoolExecutor(_THREADS) as pool:
        together = list(pool.map(work, given))
    for number, (case, one, calls) in enumerate(zip(cases, alone, together, strict=True)):
        for call in calls:
            if repeats:
                found = differences(one.values(op.mutates), call.values(op.mutates))
                faults = [
                    (where, f"alone and beside other threads it gave {d}") for where, d in found
                ]
            else:
                departures = Expectation.of(op, case, call.given).departures(call)
                faults = [(fault.where, fault.reason) for fault in departures]
            if faults:
                return [Fault("thread", f"thread {number}, {at}", why) for at, why in faults]
    return []


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Let Python change threads within a call of a kernel that is written in it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
