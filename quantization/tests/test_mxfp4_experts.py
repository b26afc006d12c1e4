"""Experts in MXFP4 as the scheme builds them, beside the ops that define the format.

``models/tests/test_gpt_oss.py`` loads whole checkpoints of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch import nn

from interposer import Config, ExpertsSpec, Resolver, Site, current_registry, place
from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_ops.experts import fused_experts
from interposer_ops.quantizers import dequantize_mxfp4
from interposer_quantization._mxfp4.experts import Mxfp4Experts
from interposer_quantization._mxfp4.scheme import Mxfp4

PREFIX = "model.layers.3.mlp.experts"
# In float64, so that the order of adding up does not show.
RESOLVER = Resolver(current_registry(), place().device, Config(canary="off"))
SITE = Site(RESOLVER, PREFIX, torch.float64)


def spec(**changes: Any) -> ExpertsSpec:
    facts = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 3, "top_k": 2}
    return ExpertsSpec(**{**facts, "activation": "swiglu_oai", "biased": True, **changes})


def filled(method: Mxfp4Experts, wanted: ExpertsSpec, seed: int) -> nn.Module:
    layer, generator = nn.Module(), torch.Generator().manual_seed(seed)
    method.create_weights(layer, SITE, wanted)
    for parameter in layer.parameters():
        if parameter.is_floating_point():
            parameter.data.normal_(generator=generator)
        else:
            parameter.data.random_(0, 256, generator=generator)
    for name in ("gate_up_proj_scales", "down_proj_scales"):
        layer.get_parameter(name).data.random_(110, 125, generator=generator)
    return layer


@settings(deadline=None, max_examples=num_examples(30))
@given(
    hidden=st.sampled_from([32, 64, 96]),
    inner=st.sampled_from([32, 64]),
    num_experts=st.integers(1, 5),
    biased=st.booleans(),
    alternating=st.booleans(),
    seed=st.integers(0, 9),
)
def test_experts_compute_with_the_dequantized_matrices(
    hidden: int, inner: int, num_experts: int, biased: bool, alternating: bool, seed: int
) -> None:
    wanted = spec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=num_experts,
        top_k=1,
        biased=biased,
        alternating=alternating,
    )
    method = Mxfp4Experts()
    layer = filled(method, wanted, seed)
    stored = {name: p.data.clone() for name, p in layer.named_parameters()}
    matrices, biases = {}, {}
    for name in ("gate_up_proj", "down_proj"):
        packed, scales = stored[f"{name}_blocks"].flatten(2), stored[f"{name}_scales"]
        matrices[name] = dequantize_mxfp4(packed, scales, torch.float64)
        biases[name] = stored.get(f"{name}_bias")
    if alternating:
        for tensors_by_name in (matrices, biases):
            first = tensors_by_name["gate_up_proj"]
            if first is not None:
                tensors_by_name["gate_up_proj"] = torch.cat((first[:, ::2], first[:, 1::2]), 1)
    stated = method.dequantized(layer)
    for matrix, own in zip(matrices.values(), stated, strict=True):
        assert torch.equal(matrix, own)
    kernel, operands = method.finalize(layer)
    assert list(layer.parameters()) == []
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, hidden, dtype=torch.float64, generator=generator)
    routing = torch.rand(4, 1, generator=generator), torch.arange(4)[:, None] % num_experts
    expected = fused_experts(
        x,
        matrices["gate_up_proj"],
        biases["gate_up_proj"],
        matrices["down_proj"],
        biases["down_proj"],
        *routing,
        "swiglu_oai",
    )
    torch.testing.assert_close(kernel(x, *operands, *routing, "swiglu_oai"), expected)


@pytest.mark.parametrize("name", ["gate_up_proj_scales", "down_proj_scales"])
def test_nan_scale_is_refused_with_its_tensor_name(name: str) -> None:
    method = Mxfp4Experts()
    layer = filled(method, spec(), 0)
    layer.get_parameter(name).data[2, 5, 0] = 255
    with pytest.raises(CheckpointError) as raised:
        method.finalize(layer)
    assert f"{PREFIX}.{name}: 1 of " in str(raised.value)
    assert "scales are 255, which is not a number, the first at [2, 5, 0]" in str(raised.value)


@pytest.mark.parametrize("changes", [{"hidden_size": 80}, {"intermediate_size": 16}])
def test_inputs_that_do_not_fill_blocks_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"blocks of 32 do not divide its (80|16) inputs"):
        Mxfp4Experts().create_weights(nn.Module(), SITE, spec(**changes))


def test_only_experts_are_quantized() -> None:
    scheme = Mxfp4.parse(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    )
    assert scheme.linear_method("model.layers.0.mlp.router", ("router",)) is None
    assert scheme.linear_method("model.layers.0.self_attn.q_proj", ("q_proj",)) is None
    assert isinstance(scheme.experts_method(PREFIX), Mxfp4Experts)


@pytest.mark.parametrize(
    "pattern", ["model.layers.3", r"model\.layers\.\d+\.mlp", "mlp.experts", PREFIX]
)
def test_exclusion_of_experts_follows_transformers(pattern: str) -> None:
    scheme = Mxfp4.parse({"quant_method": "mxfp4", "modules_to_not_convert": [pattern]})
    assert scheme.experts_method(PREFIX) is None
    other = "model.layers.33.mlp.experts"
    assert (scheme.experts_method(other) is None) == (pattern not in ("model.layers.3", PREFIX))


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="block_size"):
        Mxfp4.parse({"quant_method": "mxfp4", "block_size": 32})
    with pytest.raises(ConfigError, match=r"quantization_config\.dequantize = True"):
        Mxfp4.parse({"quant_method": "mxfp4", "dequantize": True})
