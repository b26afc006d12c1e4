"""The command `interposer`, also as Python functions: doctor, tuner, plugin template.

Every name is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

try:
    from interposer.tooling import lazy_attributes
except ImportError as error:  # ``_cli`` must stay importable: it reports the broken core
    _reason = error

    def lazy_attributes(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
        """Return a module ``__getattr__`` that raises ImportError with the reason."""

        def refuse(name: str) -> object:
            raise ImportError(f"{module}.{name} needs the core of interposer: {_reason}")

        return refuse


if TYPE_CHECKING:
    from interposer_tools._cli import main
    from interposer_tools._doctor.doctor import doctor
    from interposer_tools._doctor.health import Health, Problem
    from interposer_tools._op_catalogue import OpCatalogue, OpFacts
    from interposer_tools._plugin_template import License, NewPlugin, PluginKind
    from interposer_tools._tuner.table import Table
    from interposer_tools._tuner.tuner import tune

__all__ = [
    "Health",
    "License",
    "NewPlugin",
    "OpCatalogue",
    "OpFacts",
    "PluginKind",
    "Problem",
    "Table",
    "doctor",
    "main",
    "tune",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_tools._cli": "main",
        "interposer_tools._doctor.doctor": "doctor",
        "interposer_tools._doctor.health": "Health Problem",
        "interposer_tools._op_catalogue": "OpCatalogue OpFacts",
        "interposer_tools._plugin_template": "License NewPlugin PluginKind",
        "interposer_tools._tuner.table": "Table",
        "interposer_tools._tuner.tuner": "tune",
    },
)


def __dir__() -> list[str]:
    return __all__
