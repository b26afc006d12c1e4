"""The conformance kit as ``interposer.testing``; the code is in interposer-testing.

``interposer.testing.verify`` is ``interposer_testing.verify``, and so on for every name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from interposer.errors import install_command

# A string, because the kit depends on the core and the core must not import the kit.
_KIT = "interposer_testing"


def __getattr__(name: str) -> Any:
    try:
        kit = import_module(_KIT)
    except ModuleNotFoundError as error:
        if error.name != _KIT:
            raise
        raise ImportError(
            f"{__name__} needs the package interposer-testing, which is not installed. "
            f"Try: {install_command('interposer-testing')}"
        ) from None
    return getattr(kit, name)
