"""The patch for norms and activations: out-of-tree subclasses that vLLM builds instead."""

from __future__ import annotations

import importlib
from typing import Any

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._elementwise import Activation, Norm
from interposer_vllm._patch import Patch

__all__ = ["PATCH"]

_LAYERS = "vllm.model_executor.layers"
_CUSTOM = "vllm.model_executor.custom_op:CustomOp"
_NORM = f"{_LAYERS}.layernorm:RMSNorm"
_ACTIVATION = f"{_LAYERS}.activation:SiluAndMul"
_INIT = "(self, hidden_size, eps=1e-06, var_hidden_size=None, has_weight=True, dtype=None)"
_MIXINS = {_NORM: Norm, _ACTIVATION: Activation}


def _apply() -> Verdict:
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    replaced_elsewhere = []
    for target, mixin in _MIXINS.items():
        module, _, name = target.partition(":")
        if name in op_registry_oot:
            replaced_elsewhere.append(name)
            continue
        layer = getattr(importlib.import_module(module), name)
        # vLLM looks the replacement of a class up by this name.
        subclass: Any = type(
            name, (mixin, layer), {"__module__": __name__, "__doc__": layer.__doc__}
        )
        CustomOp.register_oot(subclass, name=name)
        # Users name the op by this attribute in vLLM's option custom_ops.
        subclass.name = layer.name
    if len(replaced_elsewhere) == len(_MIXINS):
        return Verdict.refuse(f"another plugin has replaced {', '.join(replaced_elsewhere)}")
    return Verdict.accept(
        f"except {', '.join(replaced_elsewhere)} of another plugin" if replaced_elsewhere else ""
    )


PATCH = Patch(
    name="elementwise",
    members=(
        HostMember(f"{_CUSTOM}.register_oot", "(_decorated_op_cls=None, name=None)"),
        HostMember(f"{_CUSTOM}.dispatch_forward", "(self, compile_native)"),
        HostMember(f"{_NORM}.__init__", _INIT),
        HostMember(f"{_NORM}.forward_native", "(self, x, residual=None)"),
        HostMember(f"{_ACTIVATION}.__init__", "(self, *, compile_native=True)"),
        HostMember(f"{_ACTIVATION}.forward_cpu", "(self, x)"),
    ),
    apply=_apply,
    scope="Norms and activations",
)
