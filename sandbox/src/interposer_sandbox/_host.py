"""The program that foreign code runs in, as far as a sandbox has to know it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """The program around foreign code, and what of it that code may not change.

    Attributes:
        environment: returns the variables of this process, to compare and to put back; by default
            there are none. It is asked each time: code may replace the mapping itself.
        packages: the program's own top-level packages. Code may replace no function of theirs, nor
            of packages whose names begin like one; nor may it change their classes.
        modules: imported by the process of a sandbox when it starts, so that no fork has to.
        slow_modules: imported by that process when code first imports the first of them, as that
            takes longer than the code may. All are trusted.
    """

    environment: Callable[[], MutableMapping[str, str]] = dict
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    slow_modules: tuple[str, ...] = ()
