"""The judgement whether a module can be bound at all, whatever its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from interposer import Verdict
from interposer_models._adapt.inner_forward import around_forward, is_wrapped
from interposer_models._adapt.shards import is_sharded, local

_ACCEPTED = Verdict.accept()


def judge_module(
    module: nn.Module,
    device: torch.device,
    offered: Sequence[torch.dtype],
    *,
    sharded: bool = False,
) -> Verdict:
    """Refuse a module in training, with a forward of its own, or with tensors that cannot be read.

    Args:
        device: where the kernels run.
        offered: dtypes that the platform computes in.
        sharded: its parameters may be ``DTensor``s.
    """
    if module.training:
        return Verdict.refuse("it is in training mode. Try: model.eval()")
    if is_wrapped(module) and around_forward(module) is None:
        return Verdict.refuse("the forward of this instance is replaced already")
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        tensor = local(parameter) if sharded and is_sharded(parameter) else parameter
        verdict = _judge_tensor(name, tensor, device, offered)
        if not verdict:
            return verdict
    return _ACCEPTED


def _judge_tensor(
    name: str, tensor: torch.Tensor, wanted: torch.device, offered: Sequence[torch.dtype]
) -> Verdict:
    """Refuse a tensor that is no plain memory of the device, in a dtype that it computes in."""
    if type(tensor) not in (nn.Parameter, torch.Tensor):
        return Verdict.refuse(f"its {name} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout is not torch.strided:
        return Verdict.refuse(f"its {name} has the layout {tensor.layout}")
    if tensor.is_meta:
        return Verdict.refuse(f"its {name} has no memory: it is on the meta device")
    if tensor.device.type != wanted.type:
        return Verdict.refuse(f"its {name} is on {tensor.device}, the kernels run on {wanted}")
    if tensor.dtype not in offered:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in offered)
        found = str(tensor.dtype).removeprefix("torch.")
        return Verdict.refuse(f"its {name} is {found}, the platform computes in {listed}")
    return _ACCEPTED
