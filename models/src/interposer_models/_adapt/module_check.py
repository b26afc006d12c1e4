"""Checks whether a module can be bound to any kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from interposer import Verdict
from interposer_models._adapt.inner_forward import find_rewrap, is_wrapped
from interposer_models._adapt.shards import is_sharded, local_part

_ACCEPTED = Verdict.accept()


def check_module(
    module: nn.Module,
    device: torch.device,
    supported_dtypes: Sequence[torch.dtype],
    *,
    sharded: bool = False,
) -> Verdict:
    """Refuse a module in training mode, with a replaced forward, or with unreadable tensors.

    Args:
        device: where the kernels run.
        supported_dtypes: the dtypes in which the platform computes.
        sharded: accept parameters that are ``DTensor``s.
    """
    if module.training:
        return Verdict.refuse("it is in training mode. Try: model.eval()")
    if is_wrapped(module) and find_rewrap(module) is None:
        return Verdict.refuse("the forward of this instance is replaced already")
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        tensor = local_part(parameter) if sharded and is_sharded(parameter) else parameter
        verdict = _check_tensor(name, tensor, device, supported_dtypes)
        if not verdict:
            return verdict
    return _ACCEPTED


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    kernel_device: torch.device,
    supported_dtypes: Sequence[torch.dtype],
) -> Verdict:
    """Refuse a tensor that is not plain, strided memory on the device in a supported dtype."""
    if type(tensor) not in (nn.Parameter, torch.Tensor):
        return Verdict.refuse(f"its {name} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout is not torch.strided:
        return Verdict.refuse(f"its {name} has the layout {tensor.layout}")
    if tensor.is_meta:
        return Verdict.refuse(f"its {name} has no memory: it is on the meta device")
    if tensor.device.type != kernel_device.type:
        return Verdict.refuse(
            f"its {name} is on {tensor.device}, the kernels run on {kernel_device}"
        )
    if tensor.dtype not in supported_dtypes:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported_dtypes)
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        return Verdict.refuse(f"its {name} is {dtype_name}, the platform computes in {listed}")
    return _ACCEPTED
