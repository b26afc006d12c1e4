"""Gated MLPs of transformers models: gate and up projection run as one matmul.

Dimensions: T tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules import module as module_hooks

from interposer import Verdict
from interposer_adapt._adaptation import Adaptation
from interposer_adapt._agreement import random_normals
from interposer_adapt._forwards import Forward, class_forward, forward_one_input, is_wrapped
from interposer_adapt._merged_projections import find_merged_restore
from interposer_adapt._packed_weight import PackedWeight, Restore
from interposer_adapt._projections import (
    Call,
    check_restore,
    find_restore,
    kernel_call,
    layer_kernel_name,
    set_weights,
)
from interposer_ops.layers.linear import MergedLinear, PlainLinear
from interposer_ops.layers.mlp import GatedMLP

_log = logging.getLogger("interposer")
_MULTIPLICATIONS = (operator.mul, torch.mul, "mul")
_TOLERANCE = 1e-9

# By the names in Hugging Face configurations.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class GatedParts(NamedTuple):
    """Names of the three projections of a gated MLP, and of the activation."""

    gate: str
    up: str
    down: str
    activation: str


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True, so that the tracer never traces into child modules."""
        return True


def find_gated(module: nn.Module) -> GatedParts | None:
    """Return the parts of ``down(activation(gate(x)) * up(x))``, None for other modules."""
    if sum(type(child) is nn.Linear for child in module.children()) != 3:
        return None
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # noqa: BLE001 - an untraceable module is no candidate
        _log.debug("%s is no gated MLP: its trace raised %r", type(module).__name__, error)
        return None
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    output = nodes[-1].args[0]
    if len(inputs) != 1 or _called_linear(module, output) is None:
        return None
    multiplication = output.args[0]
    if (
        multiplication.op not in ("call_function", "call_method")
        or multiplication.target not in _MULTIPLICATIONS
    ):
        return None
    for activated, up in (multiplication.args, multiplication.args[::-1]):
        if not isinstance(activated, fx.Node) or not isinstance(up, fx.Node):
            continue
        gate = activated.args[0] if activated.args else None
        if _called_linear(module, up) is None or _called_linear(module, gate) is None:
            continue
        assert isinstance(gate, fx.Node)
        name = _activation_name(module, activated)
        if name and up.args == gate.args == (inputs[0],) and len(nodes) == 7:
            return GatedParts(str(gate.target), str(up.target), str(output.target), name)
    return None


def _called_linear(module: nn.Module, node: Any) -> nn.Linear | None:
    """Return the linear layer that a node calls with one input, if any."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.args) != 1:
        return None
    child = module._modules.get(str(node.target))
    return child if type(child) is nn.Linear else None


def _activation_name(module: nn.Module, node: fx.Node) -> str:
    """Return the name of the activation that an fx node computes, found by its results, or ""."""
    act: Any
    if node.op == "call_module" and len(node.args) == 1:
        act = module._modules.get(str(node.target))
    elif node.op == "call_function" and len(node.args) == 1 and not node.kwargs:
        act = node.target
    else:
        return ""
    x = torch.linspace(-9, 9, 91, dtype=torch.float64)
    with torch.no_grad():
        try:
            result = act(x)
        except Exception:  # noqa: BLE001 - foreign code may raise anything
            return ""
    if not isinstance(result, Tensor) or result.shape != x.shape:
        return ""
    for name, function in _ACTIVATIONS.items():
        if (function(x) - result).abs().max() <= _TOLERANCE:
            return name
    return ""


_ROWS = 3
# Names of the standard layer's projections, by which quantization schemes select modules.
_STANDARD_NAMES = ("gate_proj", "up_proj", "down_proj")
# Two projections, activation, multiplication and result, each rounded on either side.
_ROUNDINGS = 10


def bind_gated_mlp(
    adaptation: Adaptation, module: nn.Module, name: str, parts: GatedParts
) -> str | Verdict:
    """Bind a gated MLP to kernels; each of the three projections can still be called alone."""
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
        gate_up_layer = cast(MergedLinear, layer.gate_up_proj)
        merged_restore = find_merged_restore(gate_up_layer, gate_up_layer.operands)
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
    merged = into.new_empty(2 * into.shape[0], into.shape[1])
    restore_merged(merged)
    into.copy_(merged[into.shape[0] :] if is_second else merged[: into.shape[0]])


def _half(kernel: Any, columns: slice, x: Tensor, *operands: Any) -> Tensor:
    """Return the outputs of the gate or the up projection, which are merged into one matmul."""
    out: Tensor = kernel(x, *operands)[..., columns]
    return out


def _forward(
    module: nn.Module,
    layer: GatedMLP,
    parts: GatedParts,
    forwards: list[Forward],
    device: torch.device,
) -> Forward:
    """Return a forward that runs the merged MLP layer while the module's children are unchanged."""
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
    """Refuse an MLP layer whose outputs differ from the module's in root mean square.

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
    return Verdict.refuse(f"its error is {excess:.1f} times as large as rounding explains")
