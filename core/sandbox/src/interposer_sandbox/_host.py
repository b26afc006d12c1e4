"""The sandbox's settings from the calling program, such as trusted packages."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple


class Guarded(NamedTuple):
    """The parts of the surrounding program that code may not replace, by name.

    Attributes:
        packages: the program's own top-level packages. Code must not replace functions or change
            classes of a package whose name begins with one of these names.
        bases: packages that the program is built on, guarded like ``packages``. A base package may
            replace the placeholder of a lazily imported module on first use.
        classes: classes of other packages, as ``"module:Class"``.
        members: attributes of the program's objects, as ``"Class.attribute"``. Foreign code must
            not set such an attribute to an object of its own package, except on its own objects.
    """

    packages: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


_NOTHING = Guarded()


@dataclass(frozen=True, slots=True)
class Host:
    """The program that runs foreign code, and the parts that the code may not change.

    Attributes:
        environment: returns the environment variables of this process, to compare and restore them;
            none by default. Called anew for each comparison, because code may replace the mapping.
        guarded: the names that code may not replace.
        modules: imported by the sandbox's process when it starts, so that no fork needs to.
        slow_modules: trusted modules with an import that exceeds the code's time limit. The
            sandbox's process imports all of them when code first imports the first one.
    """

    environment: Callable[[], MutableMapping[str, str]] = dict
    guarded: Guarded = _NOTHING
    modules: tuple[str, ...] = ()
    slow_modules: tuple[str, ...] = ()
