"""Intel GPUs as a platform: device capabilities and kernels of optional packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_xpu._platform import XPUPlatform

__all__ = [
    "XPUPlatform",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_xpu._platform": "XPUPlatform",
    },
)


def __dir__() -> list[str]:
    return __all__
