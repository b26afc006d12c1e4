"""NVIDIA GPUs as a platform: device capabilities, CUDA graphs, and kernels of optional packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_cuda._platform import CUDAPlatform

__all__ = [
    "CUDAPlatform",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_cuda._platform": "CUDAPlatform",
    },
)


def __dir__() -> list[str]:
    return __all__
