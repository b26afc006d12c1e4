"""Functions that stand for a module's forward on one instance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

Forward = Callable[..., Any]


def own_forward(module: nn.Module) -> Forward:
    """Return the forward that the class of ``module`` has."""
    return partial(type(module).forward, module)


def one_input(
    kernel: Callable[..., Tensor],
    operands: tuple[Any, ...],
    original: Forward,
    dtype: torch.dtype,
    device: torch.device,
) -> Forward:
    """Return a forward that calls ``kernel(x, *operands)``, and the original for all else.

    Other dtypes, devices, arguments and inputs that want a gradient are the original's: a kernel
    reads memory as what it was bound for, and records nothing for a backward pass.
    """

    def forward(*args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named:
            (x,) = args
            if x.dtype is dtype and x.device == device and not x.requires_grad:
                return kernel(x, *operands)
        return original(*args, **named)

    return forward


def lookup(
    kernel: Callable[..., Tensor],
    operands: tuple[Any, ...],
    original: Forward,
    num_rows: int,
    device: torch.device,
) -> Forward:
    """Return a forward that looks rows up, and the original for ids that are no rows."""

    def forward(*args: Any, **named: Any) -> Any:
        if len(args) != 1 or named or args[0].device != device:
            return original(*args, **named)
        (ids,) = args
        flat = ids.reshape(-1).long()
        # The original says which id is none; a kernel would read past the table.
        if not is_compiling() and flat.numel():
            lowest, highest = flat.aminmax()
            if lowest < 0 or highest >= num_rows:
                return original(ids)
        rows = kernel(flat, *operands)
        return rows.view(*ids.shape, rows.shape[-1])

    return forward
