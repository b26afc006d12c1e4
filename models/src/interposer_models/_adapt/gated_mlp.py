"""Gated MLPs of a foreign model: gate and up projection as one product, as in the standard layer.

Dimensions: T tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.agreement import normals
from interposer_models._adapt.forwards import Forward, one_input, own_forward
from interposer_models._adapt.gated_trace import GatedParts
from interposer_models._adapt.inner_forward import is_wrapped
from interposer_models._adapt.merged import restore_of_merged
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import (
    Call,
    bound_name,
    call_of,
    fill,
    judge_restore,
    restore_of,
)
from interposer_ops.layers.linear import MergedLinear, PlainLinear
from interposer_ops.layers.mlp import GatedMLP

_ROWS = 3
# Of the standard layer's projections, as schemes know them.
_NAMES = ("gate_proj", "up_proj", "down_proj")
# Both projections, activation, product and result; either side may round each of them.
_ROUNDINGS = 10


def bind_gated_mlp(
    adaptation: Adaptation, module: nn.Module, name: str, parts: GatedParts
) -> str | Verdict:
    """Bind a module and its three projections, which can still be called one by one."""
    gate, up, down = (module._modules[part] for part in parts[:3])
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    for part in (module, gate, up, down):
        if is_wrapped(part):
            return Verdict.refuse("another library put a forward of its own around a part of it")
        fit = adaptation.judge(part)
        if not fit:
            return fit
    biases = [part.bias for part in (gate, up, down)]
    if len({bias is None for bias in biases}) > 1 or gate.weight.shape != up.weight.shape:
        return Verdict.refuse("its projections differ in bias or size")
    inner, hidden = gate.weight.shape
    dtype = gate.weight.dtype
    with torch.device("meta"):
        layer = GatedMLP(
            adaptation.site(name, dtype), hidden, inner, parts.activation, biases[0] is not None
        )
    held_by = (layer.gate_up_proj, layer.down_proj)
    plain_parts = [isinstance(each.method, PlainLinear) for each in held_by]
    if not all(plain_parts) and parts[:3] != _NAMES:
        return Verdict.refuse("quantization knows its projections by other names")
    both = None if biases[0] is None else torch.cat([gate.bias.data, up.bias.data])
    weights = torch.cat([gate.weight.data, up.weight.data])
    fill(layer.gate_up_proj, weight=weights, bias=both)
    fill(layer.down_proj, weight=down.weight.data, bias=biases[2])
    both_plain, down_plain = plain_parts
    merged = None
    if both_plain:
        first = cast(MergedLinear, layer.gate_up_proj)
        merged = restore_of_merged(first, first.operands)
    last = (
        restore_of(layer.down_proj.method.bound, layer.down_proj.operands) if down_plain else None
    )
    if all(plain_parts):
        verdict = _judge(module, layer, gate.weight)
        if not verdict:
            return verdict
    # Halves come out of what is checked here, once for both.
    for restore, plain in ((merged, weights), (last, down.weight.data)):
        verdict = Verdict.accept() if restore is None else judge_restore(restore, plain)
        if not verdict:
            return verdict
    del weights, plain
    restores = (
        None if merged is None else partial(_restore_half, merged, False),
        None if merged is None else partial(_restore_half, merged, True),
        last,
    )
    kernel, operands = call_of(layer.gate_up_proj)
    calls: tuple[Call, ...] = (
        (partial(_half, kernel, slice(None, inner)), operands),
        (partial(_half, kernel, slice(inner, None)), operands),
        call_of(layer.down_proj),
    )
    forwards = []
    gone = (not both_plain, not both_plain, not down_plain)
    for label, part, call, restore, quantized in zip(
        parts, (gate, up, down), calls, restores, gone, strict=False
    ):
        place = f"{name}.{label}" if name else label
        forward = one_input(*call, own_forward(part), dtype, adaptation.device)
        if quantized or restore is not None:
            packed = PackedWeight(part.weight, restore, f"{place}.weight")
            adaptation.changes.pack([(part, "weight")], packed)
        adaptation.bind_forward(part, place, forward)
        forwards.append(forward)
    adaptation.changes.set(
        module, "forward", _forward(module, layer, parts, forwards, adaptation.device)
    )
    for label, part, held in zip(
        parts, (gate, up, down), (*[layer.gate_up_proj] * 2, layer.down_proj), strict=False
    ):
        adaptation.hold(part, f"{name}.{label}" if name else label, bound_name(held))
    adaptation.layers[id(module),] = layer
    return f"{type(layer).__module__.partition('.')[0]}/{type(layer).__name__}"


def _restore_half(merged: Restore, second: bool, into: Tensor) -> None:
    both = into.new_empty(2 * into.shape[0], into.shape[1])
    merged(both)
    into.copy_(both[into.shape[0] :] if second else both[: into.shape[0]])


def _half(kernel: Any, columns: slice, x: Tensor, *operands: Any) -> Tensor:
    """Return the outputs of one of two merged projections."""
    found: Tensor = kernel(x, *operands)[..., columns]
    return found


def _forward(
    module: nn.Module,
    layer: GatedMLP,
    parts: GatedParts,
    forwards: list[Forward],
    device: torch.device,
) -> Forward:
    """Return a forward that makes one call, as long as the children are what they were."""
    original = own_forward(module)
    children = module._modules
    gate, up, down = (children[part] for part in parts[:3])
    held = [(children[part], forward) for part, forward in zip(parts, forwards, strict=False)]
    dtype = gate.weight.dtype  # type: ignore[union-attr]
    hooks = [every_module._global_forward_hooks, every_module._global_forward_pre_hooks]
    for child in children.values():
        if child is not None:
            hooks += [child._forward_hooks, child._forward_pre_hooks]
    names = parts[:3]

    def forward(*args: Any, **named: Any) -> Any:
        if (
            len(args) != 1
            or named
            or args[0].dtype is not dtype
            or args[0].device != device
            or args[0].requires_grad
            or any(hooks)
            or children[names[0]] is not gate
            or children[names[1]] is not up
            or children[names[2]] is not down
            or any(vars(child).get("forward") is not own for child, own in held)
        ):
            return original(*args, **named)
        (x,) = args
        if x.ndim == 2:
            return layer(x)
        return layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


def _judge(module: nn.Module, layer: GatedMLP, weight: Tensor) -> Verdict:
    """Refuse unless the layer computes what the module does, in the root mean square.

    Each rounding adds a relative error of at most half an epsilon; sums of n terms in float32 one
    that grows with the root of n.
    """
    x = normals((_ROWS, weight.shape[1]), weight.dtype, weight.device)
    with torch.no_grad():
        expected = own_forward(module)(x).double()
        found = layer(x).double()
    epsilon = torch.finfo(weight.dtype).eps
    sums = sum(weight.shape) ** 0.5 * torch.finfo(torch.float32).eps
    bound = (_ROUNDINGS / 2 * epsilon + 2 * sums) * expected.norm()
    distance = (found - expected).norm()
    if bool(distance <= bound):
        return Verdict.accept()
    times = float(distance / bound)
    return Verdict.refuse(f"its results are {times:.1f} times as far away as rounding explains")
