"""Host memory that a device reads and writes where it lies.

Not run: no GPU was at hand when this was written.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer.errors import ConfigError
from interposer_ops.devices.host_memory import require_pinned

_TYPES = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}


class _Exported:
    """Pinned memory in the words of the CUDA array interface, version 3.

    Page-locked memory has one address for host and device where addressing is unified.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # whoever holds this holds the memory
        size = tensor.element_size()
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": _TYPES[size],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def mapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` on the current device, without a copy.

    Raises: ConfigError: it is not pinned, is empty, or its elements are no numbers of 1 to 8 bytes.
    """
    require_pinned(tensor)
    if not tensor.numel() or tensor.element_size() not in _TYPES:
        raise ConfigError(
            f"a tensor of {tensor.numel()} elements of {tensor.dtype} has nothing to map"
        )
    # The interface has no bfloat16 and no float8, so that bits are handed over.
    bits: torch.Tensor = torch.as_tensor(_Exported(tensor), device="cuda")
    return bits.view(tensor.dtype)
