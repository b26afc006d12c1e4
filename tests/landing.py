"""The part of a wide test that runs at each landing; ``make test-all`` runs all of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["landing_sample", "mark_slow", "num_examples"]

_LANDING_EXAMPLES = 6


def num_examples(number: int) -> int:
    """Return how many examples hypothesis draws: ``number``, but few at a landing.

    Use as ``@settings(max_examples=num_examples(60))``.
    """
    is_landing = settings.get_current_profile_name() == "landing"
    return min(number, _LANDING_EXAMPLES) if is_landing else number


def landing_sample(values: Iterable[Any], every: int, first: int = 0) -> list[Any]:
    """Return the values as parameters of a test, all but each ``every``-th marked slow.

    For parameters that differ in nothing a reader could name, so that any of them stands for the
    others. ``first`` is the index of the first value that is not slow.
    """
    return [value if index % every == first else slow(value) for index, value in enumerate(values)]


def slow(value: Any) -> Any:
    """Return a parameter that is marked slow, be it a value, a tuple of them or a parameter."""
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    values = value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Apply the mark ``landing(number)``: mark all but ``number`` tests of the function as slow."""
    tests_by_function = defaultdict[tuple[str, int], list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and (mark := item.get_closest_marker("landing")):
            if not hasattr(item, "callspec"):
                raise pytest.UsageError(
                    f"{item.nodeid}: the mark landing is for parametrized tests, and this is one "
                    "test. Try: @pytest.mark.slow"
                )
            (number,) = mark.args
            tests_by_function[item.nodeid.partition("[")[0], number].append(item)
    for (_, number), tests in tests_by_function.items():
        chosen = _cover(tests, number)
        for test in tests:
            if test not in chosen:
                test.add_marker(pytest.mark.slow)


def _cover(tests: list[pytest.Function], number: int) -> list[pytest.Function]:
    """Choose ``number`` tests with as many different values of the parameters as possible.

    The words of a test's id count as values too, as an id may describe several settings.
    """
    values_by_test = {
        test: {*test.callspec.indices.items(), *re.split(r"\W+", test.callspec.id)}
        for test in tests
        if not any(test.iter_markers("slow"))
    }
    # Of equals, tests that are far from each other differ more.
    waiting, chosen, covered = list(values_by_test), list[pytest.Function](), set[Any]()
    Random(0).shuffle(waiting)
    while waiting and len(chosen) < number:
        best = max(waiting, key=lambda test: len(values_by_test[test] - covered))
        waiting.remove(best)
        chosen.append(best)
        covered |= values_by_test[best]
    return chosen
