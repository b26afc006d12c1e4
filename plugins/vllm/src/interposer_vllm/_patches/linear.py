"""The patch for linear layers: out-of-tree subclasses that vLLM builds instead."""

from __future__ import annotations

from interposer import Verdict
from interposer_vllm._methods import adopt_linear
from interposer_vllm._patch import Member, Patch
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
        Member(
            "vllm.model_executor.custom_op:PluggableLayer.register_oot",
            "(_decorated_layer_cls=None, name=None)",
        ),
        Member(f"{_LINEAR}:UnquantizedLinearMethod.apply", "(self, layer, x, bias=None)"),
        Member(f"{_LINEAR}:UnquantizedLinearMethod.process_weights_after_loading", "(self, layer)"),
        Member(f"{_LINEAR}:RowParallelLinear.forward", "(self, input_)"),
        Member(f"{_LINEAR}:ColumnParallelLinear.forward", "(self, input_)"),
        Member("vllm.config:get_current_vllm_config", "()"),
    ),
    apply=_apply,
    scope="Linear layers",
)
