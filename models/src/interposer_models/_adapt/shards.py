"""Weights of which this process holds a part, as tensor parallelism makes them.

The parameter is a ``DTensor`` of the whole shape; kernels read the tensor in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: object) -> bool:
    """Say whether a tensor is a ``DTensor``, without importing what nobody has used yet."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that this process holds: of a plain one, all."""
    if not is_sharded(tensor):
        plain: Tensor = tensor
        return plain
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


class Sharding:
    """The way in which a ``DTensor`` is parted, so that one can be made of another part."""

    def __init__(self, whole: Any) -> None:
        self._mesh, self._placements = whole.device_mesh, whole.placements
        self._shape, self._stride = whole.shape, whole.stride()

    def whole(self, part: Tensor) -> Tensor:
        """Return ``part`` as what this process holds of the whole tensor."""
        from torch.distributed.tensor import DTensor

        made: Tensor = DTensor.from_local(
            part,
            self._mesh,
            self._placements,
            run_check=False,
            shape=self._shape,
            stride=self._stride,
        )
        return made


@contextmanager
def local_parameters(module: nn.Module, **others: Tensor | None) -> Iterator[None]:
    """Let a module hold the local parts of its parameters within a ``with`` block.

    Args:
        others: what it is to hold instead.
    """
    before = dict(module._parameters)
    found: dict[str, Any] = {
        name: None if tensor is None else local(tensor) for name, tensor in before.items()
    }
    module._parameters.update(found | others)
    try:
        yield
    finally:
        module._parameters.update(before)
