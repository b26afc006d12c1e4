"""A symbolic trace that recognizes gated MLPs; children are leaves."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

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
        """Return True: every child is a leaf."""
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
    """Return the name of the activation that a node computes, or ""; results are compared."""
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
