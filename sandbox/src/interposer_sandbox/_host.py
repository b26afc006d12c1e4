"""The program that foreign code runs in, as far as a sandbox has to know it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple


class Guarded(NamedTuple):
    """The names of what code may not replace of the program around it.

    Attributes:
        packages: the program's own top-level packages. Code may replace no function of theirs, nor
            of packages whose names begin like one; nor may it change their classes.
        bases: packages that the program is built on, guarded like its own. They may replace what
            stands for a module until it is first used.
        classes: classes of other packages, as ``"module:Class"``.
        members: attributes of the program's objects, as ``"Class.attribute"``. Code may not put
            there what its own package defines, unless the object is its own.
    """

    packages: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


_NOTHING = Guarded()


@dataclass(frozen=True, slots=True)
class Host:
    """The program around foreign code, and what of it that code may not change.

    Attributes:
        environment: returns the variables of this process, to compare and to put back; by default
            there are none. It is asked each time: code may replace the mapping itself.
        guarded: what code may not replace.
        modules: imported by the process of a sandbox when it starts, so that no fork has to.
        slow_modules: imported by that process when code first imports the first of them, as that
            takes longer than the code may. All are trusted.
    """

    environment: Callable[[], MutableMapping[str, str]] = dict
    guarded: Guarded = _NOTHING
    modules: tuple[str, ...] = ()
    slow_modules: tuple[str, ...] = ()
