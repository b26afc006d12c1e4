"""Names that are loaded on first use, with readable errors for a damaged installation.

An import may read files of every installed distribution. If one of these files is damaged, Python's
error does not name the distribution, so this module finds the name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from interposer_sandbox import endless_entry_points, shadowed
from interposer_sandbox import lazy_attributes as plain_attributes
from interposer_sandbox import unreadable_entry_points as unreadable_entry_points

_PACKAGE = "interposer"


def lazy_attributes(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Create a module ``__getattr__`` that imports names from other modules on first use.

    Args:
        homes: names by the module that defines them, separated by spaces.
    Returns: a function that raises InstallationError if a damaged file of a distribution, or a
        module that shadows one of interposer's, prevents the import.
    """
    load = plain_attributes(module, homes)

    def attribute(name: str) -> object:
        _check_entry_points()
        try:
            return load(name)
        except (OSError, UnicodeDecodeError) as error:
            _raise_if_any(unreadable_entry_points(), "reinstall or uninstall it", error)
            raise
        except ImportError as error:
            if problem := import_problem(error):
                raise _installation_error([problem], _SHADOW_REMEDY) from error
            raise

    return attribute


_SHADOW_REMEDY = "rename or remove it, or take its folder off PYTHONPATH and the working directory"


def import_problem(error: BaseException) -> str:
    """Name the module that shadows one of interposer's modules, or return "".

    Args:
        error: raised by an import.
    """
    return "; ".join(shadowed(_PACKAGE)) if isinstance(error, ImportError) else ""


@cache
def _check_entry_points() -> None:
    _raise_if_any(endless_entry_points(), "reinstall or uninstall it", None)


def _raise_if_any(faults: list[str], remedy: str, cause: BaseException | None) -> None:
    if faults:
        raise _installation_error(faults, remedy) from cause


def _installation_error(faults: list[str], remedy: str) -> Exception:
    from interposer._contract.errors import InstallationError

    return InstallationError(faults, remedy)
