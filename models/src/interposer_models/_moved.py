"""Names that moved to another package and still work, with a warning, for a minor version."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module

from interposer.errors import install_command


def moved_names(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for ``module`` that loads moved names from their new modules.

    Args:
        homes: names by the module that defines them, separated by spaces.
    Returns: a function that warns, and raises ImportError if the new home is not installed.
    """
    home_by_name = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in home_by_name:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _load(module, home_by_name[name], name, stacklevel=4)

    return load


def moved_module(module: str, home: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` for ``module``, whose names have all moved to ``home``."""

    def load(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _load(module, home, name, stacklevel=3)

    return load


def _load(module: str, home: str, name: str, stacklevel: int) -> object:
    # A string, because a model family needs nothing of the engine, which is built on families.
    try:
        value: object = getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        package = home.partition(".")[0]
        if error.name != package:
            raise
        raise ImportError(
            f"{module}.{name} is now {home}.{name}. "
            f"Try: {install_command(package.replace('_', '-'))}, then import it from {home}"
        ) from error
    warnings.warn(
        f"{module}.{name} is now {home}.{name}: import it from there",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return value
