"""Names of a module that are loaded on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_attributes(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Create a module ``__getattr__`` that imports names from other modules on first use.

    Args:
        homes: names by the module that defines them, separated by spaces.
    """
    modules = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return load
