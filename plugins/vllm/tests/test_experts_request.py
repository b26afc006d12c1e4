"""The request of a mixture of vLLM has its facts; what no op here describes has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from interposer import ExpertsSpec
from interposer.errors import ConfigError
from interposer_vllm._experts_request import spec_of

PARALLEL = {"dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False, "enable_eplb": False}
MOE = {
    "hidden_dim": 64,
    "hidden_dim_unpadded": 64,
    "intermediate_size_per_partition": 48,
    "intermediate_size_per_partition_unpadded": 48,
    "num_local_experts": 4,
    "experts_per_token": 2,
    "has_bias": False,
    "is_lora_enabled": False,
}
LAYER = {
    "ckpt_gate_proj_name": "w1",
    "ckpt_up_proj_name": "w3",
    "ckpt_down_proj_name": "w2",
    "swiglu_limit": None,
    "apply_router_weight_on_input": False,
    "quant_config": None,
}


def request(activation: str = "silu", **changed: Any) -> ExpertsSpec:
    def facts(of: dict[str, Any]) -> dict[str, Any]:
        return {name: changed.get(name, value) for name, value in of.items()}

    moe = SimpleNamespace(
        **facts(MOE),
        activation=SimpleNamespace(value=activation),
        moe_parallel_config=SimpleNamespace(**facts(PARALLEL)),
    )
    return spec_of(SimpleNamespace(**facts(LAYER), moe_config=moe))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_request_has_the_facts_of_vllms_moe_layer(activation: str) -> None:
    assert request(activation, has_bias=True) == ExpertsSpec(
        hidden_size=64,
        intermediate_size=48,
        num_experts=4,
        top_k=2,
        activation=activation,
        biased=True,
        projections=("w1", "w3", "w2"),
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"activation": "gelu_tanh"}, "'gelu_tanh', supported are silu, gelu"),
        ({"activation": "swigluoai"}, "'swigluoai'"),
        ({"swiglu_limit": 7.0}, r"clamped at 7\.0"),
        ({"apply_router_weight_on_input": True}, "applies router weights to the inputs of experts"),
        ({"hidden_dim_unpadded": 60}, "pads"),
        ({"intermediate_size_per_partition_unpadded": 40}, "pads"),
        ({"enable_eplb": True}, "moves its experts between workers"),
        ({"is_lora_enabled": True}, "adapters"),
        ({"dp_size": 2}, "over several workers"),
        ({"pcp_size": 2}, "over several workers"),
        ({"is_sequence_parallel": True}, "over several workers"),
        ({"quant_config": SimpleNamespace(desc_act=True)}, "drops the order"),
    ],
    ids=str,
)
def test_experts_without_an_equivalent_op_are_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        request(**changed)
