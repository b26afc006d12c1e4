"""Binding of gated MLPs: gate and up projection as one matmul, as in the standard layer.

Dimensions: T tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.agreement import random_normals
from interposer_models._adapt.forwards import Forward, class_forward, forward_one_input
from interposer_models._adapt.gated_trace import GatedParts
from interposer_models._adapt.inner_forward import is_wrapped
from interposer_models._adapt.merged import find_merged_restore
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import (
    Call,
    check_restore,
    find_restore,
    kernel_call,
    layer_kernel_name,
    set_weights,
)
from interposer_ops.layers.linear import MergedLinear, PlainLinear
from interposer_ops.layers.mlp import GatedMLP

_ROWS = 3
# Names of the standard layer's projections, by which quantization schemes select modules.
_STANDARD_NAMES = ("gate_proj", "up_proj", "down_proj")
# Two projections, activation, multiplication and result, each rounded on either side.
_ROUNDINGS = 10


def bind_gated_mlp(
    adaptation: Adaptation, module: nn.Module, name: str, parts: GatedParts
) -> str | Verdict:
    """Bind a gated MLP and all three projections, which can still be called one by one."""
    gate, up, down = (module._modules[projection] for projection in parts[:3])
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    for part in (module, gate, up, down):
        if is_wrapped(part):
            return Verdict.refuse("another library wrapped the forward of a part of it")
        verdict = adaptation.check_module(part)
        if not verdict:
            return verdict
    biases = [projection.bias for projection in (gate, up, down)]
    if len({bias is None for bias in biases}) > 1 or gate.weight.shape != up.weight.shape:
        return Verdict.refuse("its projections differ in bias or size")
    inner, hidden = gate.weight.shape
    dtype = gate.weight.dtype
    with torch.device("meta"):
        layer = GatedMLP(
            adaptation.site(name, dtype), hidden, inner, parts.activation, biases[0] is not None
        )
    linears = (layer.gate_up_proj, layer.down_proj)
    are_plain = [isinstance(linear.method, PlainLinear) for linear in linears]
    if not all(are_plain) and parts[:3] != _STANDARD_NAMES:
        return Verdict.refuse(
            "its projections do not have the names by which quantization schemes select them"
        )
    merged_bias = None if biases[0] is None else torch.cat([gate.bias.data, up.bias.data])
    weights = torch.cat([gate.weight.data, up.weight.data])
    set_weights(layer.gate_up_proj, weight=weights, bias=merged_bias)
    set_weights(layer.down_proj, weight=down.weight.data, bias=biases[2])
    is_gate_up_plain, is_down_plain = are_plain
    merged_restore = None
    if is_gate_up_plain:
        first = cast(MergedLinear, layer.gate_up_proj)
        merged_restore = find_merged_restore(first, first.operands)
    down_restore = (
        find_restore(layer.down_proj.method.bound, layer.down_proj.operands)
        if is_down_plain
        else None
    )
    if all(are_plain):
        verdict = _check_layer(module, layer, gate.weight)
        if not verdict:
            return verdict
    # The merged restore is checked once; the halves of gate and up are slices of its result.
    for restore, plain in ((merged_restore, weights), (down_restore, down.weight.data)):
        verdict = Verdict.accept() if restore is None else check_restore(restore, plain)
        if not verdict:
            return verdict
    # Releases the plain copies before the weights are packed, to bound the memory peak.
    del weights, plain
    restores = (
        None if merged_restore is None else partial(_restore_half, merged_restore, False),
        None if merged_restore is None else partial(_restore_half, merged_restore, True),
        down_restore,
    )
    kernel, operands = kernel_call(layer.gate_up_proj)
    calls: tuple[Call, ...] = (
        (partial(_half, kernel, slice(None, inner)), operands),
        (partial(_half, kernel, slice(inner, None)), operands),
        kernel_call(layer.down_proj),
    )
    forwards = []
    is_quantized = (not is_gate_up_plain, not is_gate_up_plain, not is_down_plain)
    # parts also names the activation, so that zip stops after the three projections.
    for label, projection, call, restore, is_part_quantized in zip(
        parts, (gate, up, down), calls, restores, is_quantized, strict=False
    ):
        part_name = f"{name}.{label}" if name else label
        forward = forward_one_input(*call, class_forward(projection), dtype, adaptation.device)
        if is_part_quantized or restore is not None:
            packed = PackedWeight(projection.weight, restore, f"{part_name}.weight")
            adaptation.changes.pack([(projection, "weight")], packed)
        adaptation.bind_forward(projection, part_name, forward)
        forwards.append(forward)
    adaptation.changes.set(
        module, "forward", _forward(module, layer, parts, forwards, adaptation.device)
    )
    for label, projection, part_linear in zip(
        parts, (gate, up, down), (*[layer.gate_up_proj] * 2, layer.down_proj), strict=False
    ):
        adaptation.mark_bound(
            projection, f"{name}.{label}" if name else label, layer_kernel_name(part_linear)
        )
    adaptation.layers_by_modules[id(module),] = layer
    return f"{type(layer).__module__.partition('.')[0]}/{type(layer).__name__}"


def _restore_half(restore_merged: Restore, is_second: bool, into: Tensor) -> None:
    both = into.new_empty(2 * into.shape[0], into.shape[1])
    restore_merged(both)
    into.copy_(both[into.shape[0] :] if is_second else both[: into.shape[0]])


def _half(kernel: Any, columns: slice, x: Tensor, *operands: Any) -> Tensor:
    """Compute the outputs of one of two merged projections."""
    out: Tensor = kernel(x, *operands)[..., columns]
    return out


def _forward(
    module: nn.Module,
    layer: GatedMLP,
    parts: GatedParts,
    forwards: list[Forward],
    device: torch.device,
) -> Forward:
    """Return a forward that runs the merged layer while the children are unchanged."""
    original = class_forward(module)
    children = module._modules
    gate, up, down = (children[part] for part in parts[:3])
    bound_forwards = [
        (children[part], forward) for part, forward in zip(parts, forwards, strict=False)
    ]
    dtype = gate.weight.dtype  # type: ignore[union-attr]
    hooks = [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
    for child in children.values():
        if child is not None:
            hooks += [child._forward_hooks, child._forward_pre_hooks]
    names = parts[:3]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if (
            len(args) != 1
            or kwargs
            or args[0].dtype is not dtype
            or args[0].device != device
            or args[0].requires_grad
            or any(hooks)
            or children[names[0]] is not gate
            or children[names[1]] is not up
            or children[names[2]] is not down
            or any(
                vars(child).get("forward") is not bound_forward
                for child, bound_forward in bound_forwards
            )
        ):
            return original(*args, **kwargs)
        (x,) = args
        if x.ndim == 2:
            return layer(x)
        return layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


def _check_layer(module: nn.Module, layer: GatedMLP, weight: Tensor) -> Verdict:
    """Refuse a layer with results that differ from the module's in root mean square.

    Each rounding adds a relative error of at most half an epsilon. The error of a sum of n terms in
    float32 grows with the root of n.
    """
    x = random_normals((_ROWS, weight.shape[1]), weight.dtype, weight.device)
    with torch.no_grad():
        expected = class_forward(module)(x).double()
        actual = layer(x).double()
    epsilon = torch.finfo(weight.dtype).eps
    sums = sum(weight.shape) ** 0.5 * torch.finfo(torch.float32).eps
    max_distance = (_ROUNDINGS / 2 * epsilon + 2 * sums) * expected.norm()
    distance = (actual - expected).norm()
    if bool(distance <= max_distance):
        return Verdict.accept()
    excess = float(distance / max_distance)
    return Verdict.refuse(f"its results are {excess:.1f} times as far away as rounding explains")
