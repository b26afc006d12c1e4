"""Dtype and sizes of the input of modules without parameters, and kernels by row size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer_adapt._forwards import Forward

Call = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A kernel, and the operands behind its input."""

_MIN_SIZE, _MAX_SIZE = 8, 1 << 16
# Too many sizes cost a kernel binding each; further sizes run the class's forward.
_MAX_SIZES = 8


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Dtype, device and row sizes of the modules beside a module.

    Attributes:
        dtype, device: of the first float parameter.
        sizes: possible sizes of a row, at least one.
    """

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]


def find_neighbours(model: nn.Module, name: str) -> Neighbours | None:
    """Return the neighbours of the module ``name``; None if none has a size and a dtype."""
    parent = model.get_submodule(name.rpartition(".")[0])
    sample = next(
        (parameter for parameter in parent.parameters() if parameter.is_floating_point()), None
    )
    sizes = tuple(dict.fromkeys(_sizes(parent)))[:_MAX_SIZES]
    if sample is None or not sizes:
        return None
    return Neighbours(sample.dtype, sample.device, sizes)


def _sizes(parent: nn.Module) -> Iterator[int]:
    """Yield possible row sizes in ``parent``: integer attributes, and weight sizes."""
    for value in vars(parent).values():
        if type(value) is int and _MIN_SIZE <= value <= _MAX_SIZE:
            yield value
    for child in parent.modules():
        for parameter in child._parameters.values():
            if parameter is not None and 1 <= parameter.ndim <= 2:
                size = parameter.shape[-1]
                if _MIN_SIZE <= size <= _MAX_SIZE:
                    yield size


def forward_by_size(
    calls: dict[int, Call], original: Forward, dtype: torch.dtype, device: torch.device
) -> Forward:
    """Return a forward that selects the kernel by row size, or calls ``original``."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            call = calls.get(x.shape[-1])
            if call and x.dtype is dtype and x.device == device and not x.requires_grad:
                kernel, operands = call
                return kernel(x, *operands)
        return original(*args, **kwargs)

    return forward
