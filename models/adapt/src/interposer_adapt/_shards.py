"""Weights that transformers shards for tensor parallelism, as ``DTensor``.

The parameter is a ``DTensor`` of the global shape; kernels read the local tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: object) -> bool:
    """Return True for a ``DTensor``, without importing torch.distributed."""
    dtensor_class = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor_class is not None and isinstance(tensor, dtensor_class)


def local_part(tensor: Any) -> Tensor:
    """Return this process's shard of a ``DTensor``; any other tensor is returned unchanged."""
    if not is_sharded(tensor):
        unsharded: Tensor = tensor
        return unsharded
    # to_local records a gradient otherwise.
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


class Sharding:
    """The layout of a ``DTensor``, from which another ``DTensor`` can be made."""

    def __init__(self, dtensor: Any) -> None:
        self._mesh, self._placements = dtensor.device_mesh, dtensor.placements
        self._shape, self._stride = dtensor.shape, dtensor.stride()

    def global_tensor(self, shard: Tensor) -> Tensor:
        """Return a ``DTensor`` of this layout whose local shard is ``shard``."""
        from torch.distributed.tensor import DTensor

        dtensor: Tensor = DTensor.from_local(
            shard,
            self._mesh,
            self._placements,
            run_check=False,
            shape=self._shape,
            stride=self._stride,
        )
        return dtensor


@contextmanager
def local_parameters(module: nn.Module, **replacements: Tensor | None) -> Iterator[None]:
    """Replace a module's parameters by local shards within a ``with`` block.

    Args:
        replacements: tensors for single parameters, by name.
    """
    original_parameters = dict(module._parameters)
    shards: dict[str, Any] = {
        name: None if tensor is None else local_part(tensor)
        for name, tensor in original_parameters.items()
    }
    module._parameters.update(shards | replacements)
    try:
        yield
    finally:
        module._parameters.update(original_parameters)
