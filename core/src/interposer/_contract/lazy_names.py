"""Names that are loaded on first use, with readable errors for a damaged installation.

An import may read files of every installed distribution, and torch runs code of the distributions
that add a device. If a file is damaged or the code fails, the error does not name the distribution,
so this module finds the name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from interposer_sandbox import endless_entry_points, metadata_folder, shadowed
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
        except RuntimeError as error:
            if problem := backend_problem(error):
                raise _installation_error([problem], BACKEND_REMEDY) from error
            raise

    return attribute


BACKEND_REMEDY = (
    "reinstall or uninstall that distribution, or work without its device: "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
)
"""What the user of a torch backend that cannot be loaded can do."""

_BACKEND_GROUP = "torch.backends"
_SHADOW_REMEDY = "rename or remove it, or take its folder off PYTHONPATH and the working directory"


def import_problem(error: BaseException) -> str:
    """Name the module that shadows one of interposer's modules, or return "".

    Args:
        error: raised by an import.
    """
    return "; ".join(shadowed(_PACKAGE)) if isinstance(error, ImportError) else ""


def backend_problem(error: BaseException) -> str:
    """Describe the torch backend that prevents the import of torch, or return "".

    When torch is imported, it calls the entry points ``torch.backends`` of all distributions. If
    one of them raises, torch raises a ``RuntimeError`` that names the entry point.

    Args:
        error: raised by an import.
    """
    prefix = "Failed to load the backend extension: "
    if not (isinstance(error, RuntimeError) and str(error).startswith(prefix)):
        return ""
    import importlib_metadata  # only now, because it is slow

    name = str(error).removeprefix(prefix).partition(". ")[0]
    points = importlib_metadata.entry_points(group=_BACKEND_GROUP, name=name)
    owners = sorted({_owner(point.dist) for point in points if point.dist is not None})
    owner = f" of {' and '.join(owners)}" if owners else ""
    cause = error.__cause__
    reason = f": {type(cause).__name__}: {cause}" if cause is not None else ""
    return f"torch cannot load the backend {name!r}{owner}{reason}"


def _owner(distribution: Any) -> str:
    folder = metadata_folder(distribution).parent.absolute()
    return f"{distribution.name} {distribution.version} in {folder}"


@cache
def _check_entry_points() -> None:
    _raise_if_any(endless_entry_points(), "reinstall or uninstall it", None)


def _raise_if_any(faults: list[str], remedy: str, cause: BaseException | None) -> None:
    if faults:
        raise _installation_error(faults, remedy) from cause


def _installation_error(faults: list[str], remedy: str) -> Exception:
    from interposer._contract.errors import InstallationError

    return InstallationError(faults, remedy)
