"""Inner forwards of projections and experts that tensor parallelism has wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interposer_models._adapt.forwards import Forward
from interposer_models._adapt.packed_weight import PackedWeight
from interposer_models._adapt.shards import is_sharded, local_part


def wrapped_forward(
    module: nn.Module,
    call: tuple[Callable[..., Tensor], tuple[Any, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> Forward:
    """Return a forward that runs the kernel, and adds the bias that the module has at call time.

    The wrapper may hide the bias during the call, and passes DTensors when gradients are recorded.
    The class's forward serves DTensors and calls with another weight.

    Args:
        call: the kernel with operands, without a bias.
    """
    kernel, operands = call
    original = unpacked_forward(module)
    initial_weight = module._parameters["weight"]
    known_weights = [initial_weight, None if initial_weight is None else local_part(initial_weight)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            weight = module._parameters["weight"]
            is_known = isinstance(weight, PackedWeight) or any(
                weight is candidate for candidate in known_weights
            )
            is_plain = x.dtype is dtype and x.device == device and not x.requires_grad
            if is_known and is_plain and not is_sharded(x):
                out = kernel(x, *operands)
                bias = module._parameters.get("bias")
                return out if bias is None else out + local_part(bias)
        return original(*args, **kwargs)

    return forward


def unpacked_forward(module: nn.Module) -> Forward:
    """Return the class's forward, run with packed weights restored for the call."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_global = any(is_sharded(argument) for argument in args)
        packed = {
            name: parameter
            for name, parameter in module._parameters.items()
            if isinstance(parameter, PackedWeight)
        }
        plain: Any = {
            name: weight.plain() if is_global else weight.part() for name, weight in packed.items()
        }
        # The class's forward reads the parameters of the module, so that plain tensors are put
        # there for the call.
        module._parameters.update(plain)
        try:
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(packed)

    return forward
