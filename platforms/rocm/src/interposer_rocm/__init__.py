"""GPUs of AMD as a platform: what they can do, products of 8-bit floats, and kernels of AITER."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_rocm._platform import ROCmPlatform

__all__ = [
    "ROCmPlatform",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_rocm._platform": "ROCmPlatform",
    },
)


def __dir__() -> list[str]:
    return __all__
