"""Functions that replace the forward of one module instance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

Forward = Callable[..., Any]


def class_forward(module: nn.Module) -> Forward:
    """Return the forward of the module's class, bound to the module."""
    return partial(type(module).forward, module)


def forward_one_input(
    kernel: Callable[..., Tensor],
    operands: tuple[Any, ...],
    original: Forward,
    dtype: torch.dtype,
    device: torch.device,
) -> Forward:
    """Return a forward that calls ``kernel(x, *operands)`` where possible, else ``original``.

    ``original`` serves other dtypes, devices and arguments, and inputs that require a gradient: the
    kernel reads memory in the dtype it was bound for, and records no backward pass.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            if x.dtype is dtype and x.device == device and not x.requires_grad:
                return kernel(x, *operands)
        return original(*args, **kwargs)

    return forward


def forward_lookup(
    kernel: Callable[..., Tensor],
    operands: tuple[Any, ...],
    original: Forward,
    num_rows: int,
    device: torch.device,
) -> Forward:
    """Return a forward that looks up rows by ``kernel``, and calls ``original`` for invalid ids."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or args[0].device != device:
            return original(*args, **kwargs)
        (ids,) = args
        flat = ids.reshape(-1).long()
        # The original raises for an id out of range; a kernel would read past the table.
        # Under torch.compile, reading values would break the graph.
        if not is_compiling() and flat.numel():
            lowest, highest = flat.aminmax()
            if lowest < 0 or highest >= num_rows:
                return original(ids)
        rows = kernel(flat, *operands)
        return rows.view(*ids.shape, rows.shape[-1])

    return forward
