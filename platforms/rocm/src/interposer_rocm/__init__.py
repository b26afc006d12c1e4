"""AMD GPUs as a platform: device capabilities, FP8 GEMM by hipBLASLt, and kernels of AITER."""

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
