"""What vLLM loaded is put into the parameters of a method, or refused by name and shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interposer import Config, Resolver, Site, current_registry, place
from interposer.errors import ConfigError
from interposer_ops.layers.linear import Linear
from interposer_vllm._stored_weights import empty_layer, fill, narrow, outputs_by_layer, widen

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
            },
        }
    },
}
W4A8 = {
    **PACKED,
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            **PACKED["config_groups"]["group_0"],  # type: ignore[index]
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "dynamic": True,
                "symmetric": True,
            },
        }
    },
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PARTS = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
IN, OUT = 64, 64


def created(settings: dict[str, Any], parts: dict[str, int] = PARTS) -> tuple[Any, Linear]:
    """Return a method and a module with its parameters, without memory."""
    resolver = Resolver(current_registry(), place().device, Config())
    resolver.choose_scheme(settings)
    prefix = "model.layers.0.self_attn.qkv_proj"
    method = resolver.scheme.linear_method(prefix, tuple(parts))  # type: ignore[union-attr]
    assert method is not None
    holder = empty_layer(parts)
    with torch.device("meta"):
        method.create_weights(
            holder, Site(resolver, prefix, torch.float32), IN, sum(parts.values()), False
        )
    return method, holder


def gptq_weights() -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (IN // 8, OUT), generator=generator)
    return {
        "qweight": words.to(torch.int32),
        "qzeros": torch.full((IN // 32, OUT // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.rand(IN // 32, OUT, generator=generator).to(torch.bfloat16),
        "bias": None,
    }


def test_gptq_weights_agree_with_their_definition() -> None:
    method, holder = created(GPTQ)
    loaded = gptq_weights()
    fill(holder, loaded)
    # Groups follow each other, and vLLM holds no g_idx at all.
    words, scales = loaded["qweight"], loaded["scales"]
    assert words is not None
    assert scales is not None
    codes = torch.stack([words >> 4 * n & 15 for n in range(8)], 1).reshape(IN, OUT)
    expected = (codes.double() - 8) * scales.double().repeat_interleave(32, 0)
    weight = method.dequantized(holder)
    assert torch.equal(weight, expected.T)
    kernel, operands = method.finalize(holder)
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        kernel(x, *operands), (x.double() @ weight.T).float(), rtol=1e-4, atol=1e-3
    )


def test_awq_weights_agree_with_their_definition() -> None:
    method, holder = created(AWQ)
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**31), 2**31 - 1, (IN, OUT // 8), generator=generator).int()
    zeros = torch.randint(-(2**31), 2**31 - 1, (IN // 32, OUT // 8), generator=generator).int()
    scales = torch.rand(IN // 32, OUT, generator=generator)
    fill(holder, {"qweight": words, "qzeros": zeros, "scales": scales, "bias": None})
    # The outputs of a word, from its lowest bits: 0, 2, 4, 6, 1, 3, 5, 7.
    places = (0, 4, 1, 5, 2, 6, 3, 7)

    def codes(packed: Tensor) -> Tensor:
        return torch.stack([packed >> 4 * n & 15 for n in places], -1).flatten(1)

    expected = codes(words).double() - codes(zeros).double().repeat_interleave(32, 0)
    expected *= scales.double().repeat_interleave(32, 0)
    assert torch.equal(method.dequantized(holder), expected.T)


def test_a_parameter_with_two_names_is_read_once() -> None:
    method, holder = created(W4A8)
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-8, 8, (OUT, IN), generator=generator).to(torch.int8)
    weight = nn.Parameter(codes, requires_grad=False)
    scales = torch.rand(OUT, IN // 32, generator=generator)
    fill(holder, {"weight": weight, "weight_packed": weight, "weight_scale": scales})
    expected = codes.double() * scales.double().repeat_interleave(32, 1)
    assert torch.equal(method.dequantized(holder), expected)


def test_a_different_parameter_under_the_second_name_is_refused() -> None:
    _, holder = created(W4A8)
    codes = torch.zeros(OUT, IN, dtype=torch.int8)
    scales = torch.ones(OUT, IN // 32)
    with pytest.raises(ConfigError, match="also stores weight_packed"):
        fill(holder, {"weight": codes, "weight_packed": codes.clone(), "weight_scale": scales})


def test_each_fused_layer_has_its_own_input_order() -> None:
    method, holder = created({**GPTQ, "desc_act": True})
    order = torch.randperm(IN, generator=torch.Generator().manual_seed(4))
    groups = (order // 32).int()
    fill(holder, {**gptq_weights(), "g_idx": groups.repeat(len(PARTS))})
    weight = method.dequantized(holder)
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(5))
    kernel, operands = method.finalize(holder)
    torch.testing.assert_close(
        kernel(x, *operands), (x.double() @ weight.T).float(), rtol=1e-4, atol=1e-3
    )


def test_a_single_group_needs_no_input_order() -> None:
    _, holder = created({**GPTQ, "desc_act": True, "group_size": -1})
    loaded = gptq_weights()
    for name in ("qzeros", "scales"):
        rows = loaded[name]
        assert rows is not None
        loaded[name] = rows[:1]
    fill(holder, loaded)
    assert not holder.get_parameter("g_idx").any()


def test_scales_are_loaded_in_the_declared_dtype() -> None:
    _, holder = created(GPTQ)
    layer = nn.Module()
    for name, tensor in gptq_weights().items():
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
    former = widen(layer, holder)
    assert former == {"scales": torch.bfloat16}
    scales = layer.get_parameter("scales")
    assert scales.dtype == torch.float32
    assert layer.get_parameter("qweight").dtype == torch.int32
    stored = torch.full_like(scales, 1 + 2**-10)
    scales.data.copy_(stored)
    fill(holder, layer._parameters)
    assert torch.equal(holder.get_parameter("scales"), stored)
    narrow(layer, former)
    assert torch.equal(layer.get_parameter("scales"), stored.bfloat16())


def test_packed_weights_have_the_shape_of_the_shard() -> None:
    _, holder = created(PACKED)
    fill(
        holder,
        {
            "weight_packed": torch.zeros(OUT, IN // 8, dtype=torch.int32),
            "weight_scale": torch.ones(OUT, IN // 32, dtype=torch.bfloat16),
            # That of the last of three, as vLLM loads it.
            "weight_shape": torch.tensor([16, IN]),
        },
    )
    assert holder.get_parameter("weight_shape").view(-1, 2).tolist() == [
        [size, IN] for size in PARTS.values()
    ]


def test_tensors_of_the_right_layout_are_not_copied() -> None:
    _, holder = created(GPTQ)
    loaded = gptq_weights()
    fill(holder, loaded)
    weight = loaded["qweight"]
    assert weight is not None
    assert holder.get_parameter("qweight").data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"qweight": torch.zeros(4, OUT, dtype=torch.int32)},
            r"qweight as \[4, 64\], not \[8, 64\]",
        ),
        ({"qweight": torch.zeros(IN // 8, OUT)}, r"qweight as torch\.float32, not torch\.int32"),
        ({"scales": None}, "holds no scales"),
        ({"exponents": torch.zeros(3)}, "also stores exponents"),
    ],
)
def test_another_layout_is_refused(change: dict[str, Tensor | None], reason: str) -> None:
    _, holder = created(GPTQ)
    with pytest.raises(ConfigError, match=reason):
        fill(holder, gptq_weights() | change)


@pytest.mark.parametrize(
    ("sizes", "fused", "expected"),
    [
        ([32, 16, 16], {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}, PARTS),
        ([32, 16, 16], {}, {"qkv_proj": 64}),
        ([32, 16, 16], {"qkv_proj": ["qkv_proj"]}, {"qkv_proj": 64}),
        ([64], {"gate_up_proj": ["gate_proj", "up_proj"]}, {"qkv_proj": 64}),
    ],
)
def test_fused_layers_have_the_checkpoints_names(
    sizes: list[int], fused: dict[str, list[str]], expected: dict[str, int]
) -> None:
    assert outputs_by_layer("model.layers.0.self_attn.qkv_proj", sizes, fused) == expected
