"""The environment of the process, which no other module touches.

Nothing is written to it, but that what a plugin changed while it was examined is put back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["child_environment", "environment_guard", "variables"]


def variables() -> Mapping[str, str]:
    """Return the variables of the environment by name."""
    return os.environ


def child_environment(**defaults: str) -> dict[str, str]:
    """Return the environment for a child process, with ``defaults`` where it sets nothing."""
    return {**defaults, **os.environ}


@contextmanager
def environment_guard() -> Iterator[list[str]]:
    """Put back every variable of the environment that changes inside a ``with`` block.

    The list that is yielded holds the names of those variables once the block has ended.
    """
    before = dict(os.environ)
    changed: list[str] = []
    try:
        yield changed
    finally:
        after = dict(os.environ)
        if after != before:
            names = sorted(before.keys() | after.keys())
            changed += [name for name in names if before.get(name) != after.get(name)]
            for name in changed:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]
