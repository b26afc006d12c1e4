"""The program that foreign code runs in, as far as a sandbox must know it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple


class Guarded(NamedTuple):
    """The parts of the surrounding program that code may not replace, by name.

    Attributes:
        packages: the program's own top-level packages. Code may replace no function of these
            packages, nor of packages whose names begin like one, and may not change their classes.
        bases: packages that the program is built on, guarded like its own. They may replace a
            placeholder for a module when the module is first used.
        classes: classes of other packages, as ``"module:Class"``.
        members: attributes of the program's objects, as ``"Class.attribute"``. Code may not assign
            objects of its own package to them, unless the owner is its own.
    """

    packages: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


_NOTHING = Guarded()


@dataclass(frozen=True, slots=True)
class Host:
    """The program around foreign code, and the parts that code may not change.

    Attributes:
        environment: returns the environment variables of this process, to compare and restore them;
            none by default. It is called each time, because code may replace the mapping itself.
        guarded: the names that code may not replace.
        modules: imported by the sandbox's process when it starts, so that no fork needs to.
        slow_modules: imported by that process when code first imports the first of them, because
            their import would exceed the code's time limit. All of them are trusted.
    """

    environment: Callable[[], MutableMapping[str, str]] = dict
    guarded: Guarded = _NOTHING
    modules: tuple[str, ...] = ()
    slow_modules: tuple[str, ...] = ()
