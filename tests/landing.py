"""The part of a wide test that runs at each landing; ``make test-all`` runs all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["landing_sample", "num_examples"]

_LANDING_EXAMPLES = 12


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
