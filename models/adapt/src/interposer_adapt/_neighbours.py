"""Dtype and sizes of the input of modules without parameters, and kernels by row size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer import BoundKernel, Site, Verdict
from interposer_adapt._adaptation import Adaptation, kernel_name
from interposer_adapt._agreement import MAGNITUDES, random_normals
from interposer_adapt._forwards import Forward, class_forward

Call = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A kernel, and the operands behind its input."""

_MIN_SIZE, _MAX_SIZE = 8, 1 << 16
# Too many sizes cost a kernel binding each; further sizes run the class's forward.
_MAX_SIZES = 8
_ROWS = (2, 3)


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


BindSize = Callable[[Site, Neighbours, int], tuple[BoundKernel[..., Any], tuple[Any, ...]]]
"""Binds a kernel for rows of a size; returns the kernel and the operands behind its input."""


def bind_by_size(
    adaptation: Adaptation,
    module: nn.Module,
    name: str,
    bind_size: BindSize,
    check: Callable[[Forward, Tensor], Verdict],
) -> str | Verdict:
    """Bind a module without parameters to one kernel for each row size of its neighbours.

    Args:
        check: compares the forward that calls the kernels with the module on an input.
    Returns: the names of the kernels, or a refusal.
    """
    verdict = adaptation.check_module(module)
    if not verdict:
        return verdict
    neighbours = _find_neighbours(adaptation.model, name)
    if neighbours is None:
        return Verdict.refuse("no neighbouring module states the size and dtype of its input")
    dtype, device = neighbours.dtype, neighbours.device
    verdict = adaptation.check_rows(dtype, device)
    if not verdict:
        return verdict
    site = adaptation.site(name, dtype)
    calls: dict[int, Call] = {}
    kernels: dict[str, None] = {}
    for size in neighbours.sizes:
        bound_kernel, operands = bind_size(site, neighbours, size)
        calls[size] = bound_kernel.function, operands
        kernels[kernel_name(bound_kernel.choice)] = None
    forward = _forward_by_size(calls, class_forward(module), dtype, adaptation.device)
    for size in neighbours.sizes:
        for scale in MAGNITUDES:
            x = random_normals((*_ROWS, size), torch.float32, device).mul(scale).to(dtype)
            verdict = check(forward, x)
            if not verdict:
                return verdict
    adaptation.bind_forward(module, name, forward)
    return ", ".join(kernels)


def _find_neighbours(model: nn.Module, name: str) -> Neighbours | None:
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


def _forward_by_size(
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
