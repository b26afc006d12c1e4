"""The patch for linear layers: out-of-tree subclasses that vLLM builds instead."""

from __future__ import annotations

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._methods import adopt_linear
from interposer_vllm._patch import Patch
from interposer_vllm._replacement import replace_layers

__all__ = ["PATCH"]

_LINEAR = "vllm.model_executor.layers.linear"
_NAMES = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
)


def _apply() -> Verdict:
    return replace_layers(_LINEAR, dict.fromkeys(_NAMES, adopt_linear))


PATCH = Patch(
    name="linear",
    members=(
        HostMember(
            "vllm.model_executor.custom_op:PluggableLayer.register_oot",
            "(_decorated_layer_cls=None, name=None)",
        ),
        HostMember(f"{_LINEAR}:UnquantizedLinearMethod.apply", "(self, layer, x, bias=None)"),
        HostMember(
            f"{_LINEAR}:UnquantizedLinearMethod.process_weights_after_loading", "(self, layer)"
        ),
        HostMember(f"{_LINEAR}:RowParallelLinear.forward", "(self, input_)"),
        HostMember(f"{_LINEAR}:ColumnParallelLinear.forward", "(self, input_)"),
        HostMember("vllm.config:get_current_vllm_config", "()"),
    ),
    apply=_apply,
    scope="Linear layers",
)
