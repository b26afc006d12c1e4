"""Forwards of projections and experts within those that tensor parallelism sets around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interposer_models._adapt.forwards import Forward
from interposer_models._adapt.packed_weight import PackedWeight
from interposer_models._adapt.shards import is_sharded, local


def wrapped_forward(
    module: nn.Module,
    call: tuple[Callable[..., Tensor], tuple[Any, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> Forward:
    """Return a forward that multiplies, and adds the bias that the module holds at that time.

    What is around it may hide the bias, and gives whole tensors where gradients are recorded: these
    calls, and those with another weight, are the class's own.

    Args:
        call: the kernel with its operands; there is no bias among them.
    """
    kernel, operands = call
    original = unpacked_forward(module)
    first = module._parameters["weight"]
    known = [first, None if first is None else local(first)]

    def forward(*args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named:
            (x,) = args
            held = module._parameters["weight"]
            mine = isinstance(held, PackedWeight) or any(held is each for each in known)
            plain = x.dtype is dtype and x.device == device and not x.requires_grad
            if mine and plain and not is_sharded(x):
                found = kernel(x, *operands)
                bias = module._parameters.get("bias")
                return found if bias is None else found + local(bias)
        return original(*args, **named)

    return forward


def unpacked_forward(module: nn.Module) -> Forward:
    """Return the forward of the module's class, with weights that a kernel packed made anew."""

    def forward(*args: Any, **named: Any) -> Any:
        whole = any(is_sharded(each) for each in args)
        packed = {
            name: held
            for name, held in module._parameters.items()
            if isinstance(held, PackedWeight)
        }
        plain: Any = {name: each.plain() if whole else each.part() for name, each in packed.items()}
        module._parameters.update(plain)
        try:
            return type(module).forward(module, *args, **named)
        finally:
            module._parameters.update(packed)

    return forward
