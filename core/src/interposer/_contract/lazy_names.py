"""Names that are loaded on first use, with faults of the installation named.

Imports read files of every distribution, and fail with those of one, whose name they do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from interposer_sandbox import endless_entry_points, shadowed
from interposer_sandbox import lazy_attributes as plain_attributes
from interposer_sandbox import unreadable_entry_points as unreadable_entry_points

_OWN = "interposer"


def lazy_attributes(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of ``module`` for names that other modules define.

    Args:
        homes: names by the module that defines them, with spaces between.
    Returns: a function that raises InstallationError where a file of a distribution, or a module in
        place of one of interposer's own, keeps the import from working.
    """
    load = plain_attributes(module, homes)

    def attribute(name: str) -> object:
        _check_entry_points()
        try:
            return load(name)
        except (OSError, UnicodeDecodeError) as error:
            _raise_named(unreadable_entry_points(), "reinstall or uninstall it", error)
            raise
        except ImportError as error:
            if problem := import_problem(error):
                raise _named([problem], _SHADOW_MEND) from error
            raise

    return attribute


_SHADOW_MEND = "rename or remove it, or take its folder off PYTHONPATH and the working directory"


def import_problem(error: BaseException) -> str:
    """Return which module is imported in place of one of interposer's own, "" for none.

    Args:
        error: that an import raised.
    """
    return "; ".join(shadowed(_OWN)) if isinstance(error, ImportError) else ""


@cache
def _check_entry_points() -> None:
    _raise_named(endless_entry_points(), "reinstall or uninstall it", None)


def _raise_named(faults: list[str], mend: str, cause: BaseException | None) -> None:
    if faults:
        raise _named(faults, mend) from cause


def _named(faults: list[str], mend: str) -> Exception:
    from interposer._contract.errors import InstallationError

    return InstallationError(faults, mend)
