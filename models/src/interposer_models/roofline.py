"""The work of a model's steps and the roofline of a device, which together bound the speed.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_models._bench.roofs import Roofs, measured_roofs
    from interposer_models._bench.work import Mixing, ModelWork, Weights

__all__ = ["Mixing", "ModelWork", "Roofs", "Weights", "measured_roofs"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_models._bench.roofs": "Roofs measured_roofs",
        "interposer_models._bench.work": "Mixing ModelWork Weights",
    },
)


def __dir__() -> list[str]:
    return __all__
