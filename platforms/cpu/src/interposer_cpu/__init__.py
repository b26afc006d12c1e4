"""CPU platform plugin of interposer: device description, native kernels and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_cpu._kernels.fusion import fused
    from interposer_cpu._platform import CPUPlatform

__all__ = [
    "CPUPlatform",
    "fused",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_cpu._kernels.fusion": "fused",
        "interposer_cpu._platform": "CPUPlatform",
    },
)


def __dir__() -> list[str]:
    return __all__
