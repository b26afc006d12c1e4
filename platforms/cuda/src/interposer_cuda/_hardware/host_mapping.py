"""Zero-copy views of pinned host memory on a CUDA device.

No GPU has run this module.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer.errors import ConfigError
from interposer_ops.devices.host_memory import require_pinned

_TYPESTRS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}


class _PinnedArray:
    """Pinned memory behind the CUDA array interface, version 3.

    With unified addressing, page-locked memory has the same address on host and device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # keeps the memory alive as long as the view
        element_bytes = tensor.element_size()
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * element_bytes for stride in tensor.stride()),
            "typestr": _TYPESTRS[element_bytes],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def device_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of pinned ``tensor`` on the current device, without a copy.

    Raises: ConfigError: ``tensor`` is not pinned, is empty, or its elements are not numbers of 1 to
        8 bytes.
    """
    require_pinned(tensor)
    if not tensor.numel() or tensor.element_size() not in _TYPESTRS:
        raise ConfigError(
            f"a tensor of {tensor.numel()} elements of {tensor.dtype} has nothing to map"
        )
    # The interface has no bfloat16 and no float8, so the bits are passed as integers.
    bits: torch.Tensor = torch.as_tensor(_PinnedArray(tensor), device="cuda")
    return bits.view(tensor.dtype)
