"""Norms and activations: out-of-tree classes in the place of vLLM's, where those are called."""

from __future__ import annotations

import importlib
from typing import Any

from interposer import Verdict
from interposer_vllm._elementwise import Activation, Norm
from interposer_vllm._seam import Member, Seam

__all__ = ["SEAM"]

_LAYERS = "vllm.model_executor.layers"
_CUSTOM = "vllm.model_executor.custom_op:CustomOp"
_NORM = f"{_LAYERS}.layernorm:RMSNorm"
_ACTIVATION = f"{_LAYERS}.activation:SiluAndMul"
_BUILT = "(self, hidden_size, eps=1e-06, var_hidden_size=None, has_weight=True, dtype=None)"
_PARTS = {_NORM: Norm, _ACTIVATION: Activation}


def _take() -> Verdict:
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    others = []
    for target, part in _PARTS.items():
        module, _, name = target.partition(":")
        if name in op_registry_oot:
            others.append(name)
            continue
        layer = getattr(importlib.import_module(module), name)
        # Under the same name, by which vLLM finds what stands in the place of a class.
        replaced: Any = type(
            name, (part, layer), {"__module__": __name__, "__doc__": layer.__doc__}
        )
        CustomOp.register_oot(replaced, name=name)
        # By this one users turn it on and off.
        replaced.name = layer.name
    if len(others) == len(_PARTS):
        return Verdict.refuse(f"another plugin has replaced {', '.join(others)}")
    return Verdict.accept(f"except {', '.join(others)} of another plugin" if others else "")


SEAM = Seam(
    name="elementwise",
    members=(
        Member(f"{_CUSTOM}.register_oot", "(_decorated_op_cls=None, name=None)"),
        Member(f"{_CUSTOM}.dispatch_forward", "(self, compile_native)"),
        Member(f"{_NORM}.__init__", _BUILT),
        Member(f"{_NORM}.forward_native", "(self, x, residual=None)"),
        Member(f"{_ACTIVATION}.__init__", "(self, *, compile_native=True)"),
        Member(f"{_ACTIVATION}.forward_cpu", "(self, x)"),
    ),
    take=_take,
    stays="Norms and activations",
)
