"""The checks that repeated and concurrent calls of a kernel give the same result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

from interposer_testing._checks.call import Call, CallArguments, Subject, differences
from interposer_testing._checks.exemplar import Exemplar
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault
from interposer_testing._judge.remote import RemoteFunction

_RUNS = 5
_THREADS = 8
_CALLS = 4
_SWITCH_SECONDS = 1e-5


def check_determinism(subject: Subject, exemplar: Exemplar) -> list[Fault]:
    """Check that five calls with equal arguments, each in new memory, give equal bits."""
    case, mutates = exemplar.build(), subject.op.mutates
    first = subject.call(subject.given(case)).values(mutates)
    for run in range(2, _RUNS + 1):
        again = subject.call(subject.given(case)).values(mutates)
        faults = [
            Fault("determinism", where, f"runs 1 and {run} gave {difference}")
            for where, difference in differences(first, again)
        ]
        if faults:
            return faults
    return []


def check_threads(subject: Subject, exemplar: Exemplar) -> list[Fault]:
    """Check the results of eight threads that call the kernel at once, each with other values.

    A ``deterministic`` kernel that gives the same bits twice in one thread must give these bits in
    all threads. Any other kernel must stay within the op's error bound.
    """
    op = subject.op
    cases = [exemplar.build(number) for number in range(_THREADS)]
    alone, again = ([subject.call(subject.given(case)) for case in cases] for _ in range(2))
    repeats_bits = "deterministic" in subject.properties and not any(
        list(differences(first.values(op.mutates), second.values(op.mutates)))
        for first, second in zip(alone, again, strict=True)
    )
    arguments_by_thread = [[subject.given(case) for _ in range(_CALLS)] for case in cases]
    together = _calls_together(subject, arguments_by_thread)
    for number, (case, single, calls) in enumerate(zip(cases, alone, together, strict=True)):
        for call in calls:
            if repeats_bits:
                faults = [
                    (where, f"one thread and eight threads gave {difference}")
                    for where, difference in differences(
                        single.values(op.mutates), call.values(op.mutates)
                    )
                ]
            else:
                departures = Expectation.of(op, case, call.given).departures(call)
                faults = [(fault.where, fault.reason) for fault in departures]
            if faults:
                return [
                    Fault("thread", f"thread {number}, {where}", reason) for where, reason in faults
                ]
    return []


def _calls_together(
    subject: Subject, arguments_by_thread: list[list[CallArguments]]
) -> list[list[Call]]:
    """Run the calls of all threads concurrently, and return the finished calls by thread."""
    num_threads = len(arguments_by_thread)
    if isinstance(subject.function, RemoteFunction):
        # Call n is made by thread n modulo the number of threads.
        columns = list(zip(*arguments_by_thread, strict=True))
        inputs = [call_arguments for column in columns for call_arguments in column]
        values = [subject.positional({**g.arguments, **g.prepared}) for g in inputs]
        results = subject.function.together(values, num_threads)
        calls = [Call(g, result) for g, result in zip(inputs, results, strict=True)]
        return [
            calls[thread :: len(arguments_by_thread)] for thread in range(len(arguments_by_thread))
        ]
    # The barrier makes the first calls of all threads start together.
    barrier = Barrier(len(arguments_by_thread))

    def work(arguments_of_calls: list[CallArguments]) -> list[Call]:
        barrier.wait()
        return [subject.call(call_arguments) for call_arguments in arguments_of_calls]

    with _frequent_switches(), ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, arguments_by_thread))


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Make Python switch threads often enough to interrupt kernels written in Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
