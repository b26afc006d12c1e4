"""The minimum work of a model's steps and a device's roofline, which bound the speed of steps.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_engine._bench.roofline import Mixing, ModelWork, Roofs, Weights, measured_roofs

__all__ = ["Mixing", "ModelWork", "Roofs", "Weights", "measured_roofs"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_engine._bench.roofline": "Mixing ModelWork Roofs Weights measured_roofs",
    },
)


def __dir__() -> list[str]:
    return __all__
