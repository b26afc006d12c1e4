"""Layers of int8 weights: their constants, results, and arguments of kernels."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch

from interposer import (
    Capability,
    Config,
    Device,
    Kernel,
    Resolver,
    Site,
    current_registry,
    hookimpl,
    register,
)
from interposer.errors import ConfigError
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.quantized_linear import w8a16_linear
from interposer_quantization._compressed_tensors.scheme import CompressedTensors

DEVICE = Device("cpu", "cpu", "test", Capability("any"))


def scheme(group_size: int | None) -> CompressedTensors:
    strategy = "channel" if group_size is None else "group"
    weights = {"strategy": strategy, "group_size": group_size}
    return CompressedTensors.parse(
        {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "format": "int-quantized",
            "quantization_status": "compressed",
        }
    )


def site(group_size: int | None, dtype: torch.dtype, *plugins: ModuleType) -> Site:
    with ExitStack() as registered:
        for plugin in plugins:
            registered.enter_context(register(plugin))
        registry = current_registry()
    # The kernels of these tests need not compute what the op defines.
    resolver = Resolver(registry, DEVICE, Config(canary="off"), scheme(group_size))
    return Site(resolver, "block", dtype)


def fill(layer: Linear, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in layer.named_parameters():
        if name == "weight":
            parameter.random_(-128, 128, generator=generator)
        else:
            parameter.uniform_(0.001, 0.01, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_multiplies_by_the_stored_weight(
    dtype: torch.dtype, group_size: int | None, bias: bool
) -> None:
    layer = Linear(site(group_size, dtype).at("down_proj"), 64, 48, bias)
    fill(layer)
    layer.finalize()
    scale = layer.get_parameter("weight_scale")
    assert scale.shape == (48, 1 if group_size is None else 64 // group_size)
    weight = layer.get_parameter("weight").double()
    dequantized = weight * scale.double().repeat_interleave(64 // scale.shape[1], 1)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ dequantized.T
    if bias:
        expected += layer.get_parameter("bias").double()
    actual = layer(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_fused_layer_equals_separate_layers() -> None:
    parts = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    at = site(16, torch.float32)
    fused = MergedLinear(at.at("qkv_proj"), 64, parts, bias=True)
    fill(fused)
    fused.finalize()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    start, outputs = 0, []
    for name, size in parts.items():
        part = Linear(at.at(name), 64, size, bias=True)
        for parameter, stored in part.named_parameters():
            stored.copy_(fused.get_parameter(parameter)[start : start + size])
        part.finalize()
        outputs.append(part(x))
        start += size
    torch.testing.assert_close(torch.cat(outputs, -1), fused(x))


def test_finalized_layer_keeps_one_copy_of_the_weight() -> None:
    layer = Linear(site(None, torch.bfloat16).at("down_proj"), 64, 48)
    fill(layer)
    layer.finalize()
    assert sum(parameter.nbytes for parameter in layer.parameters()) == 48 * 64 + 48 * 4
    pointers = {parameter.data_ptr() for parameter in layer.parameters()}
    assert {o.data_ptr() for o in layer.operands if isinstance(o, torch.Tensor)} == pointers


def transposing_plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a plugin whose kernel wants its weight transposed and leaves the rest as it is."""

    def prepare(**constants: Any) -> dict[str, Any]:
        return {**constants, "weight": constants["weight"].T.contiguous()}

    def compute(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return w8a16_linear(x, weight.T, *others)

    records = [
        Kernel(
            "w8a16_linear",
            "w8a16_linear_transposed",
            "transposing:compute",
            prepare="transposing:prepare",
        )
    ]
    module = ModuleType("transposing")
    hook = hookimpl(lambda: records)
    module.__dict__.update(compute=compute, prepare=prepare, interposer_records=hook)
    monkeypatch.setitem(sys.modules, "transposing", module)
    return module


def test_prepared_tensor_replaces_the_stored_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Linear(site(16, torch.float32).at("down_proj"), 64, 48, bias=True)
    at = site(16, torch.float32, transposing_plugin(monkeypatch))
    layer = Linear(at.at("down_proj"), 64, 48, bias=True)
    for each in (plain, layer):
        fill(each)
        each.finalize()
    assert {name for name, _ in layer.named_parameters()} == {"weight_scale", "bias"}
    assert layer.operands[0].shape == (64, 48)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize(("group_size", "num_groups"), [(None, 1), (16, 4)])
def test_kernel_request_has_the_layer_sizes(group_size: int | None, num_groups: int) -> None:
    at = site(group_size, torch.bfloat16)
    Linear(at.at("down_proj"), 64, 48)
    (choice,) = (
        choice for choice, _ in at.resolver.choices.values() if choice.request.kind == "kernel"
    )
    assert choice.request.name == "w8a16_linear"
    assert choice.request.dtype == "bfloat16"
    assert choice.request.dims == {
        "in_features": 64,
        "out_features": 48,
        "group_size": 64 // num_groups,
        "num_groups": num_groups,
        "asymmetric": False,
        "biased": False,
    }


def test_groups_must_divide_the_inputs() -> None:
    with pytest.raises(ConfigError, match=r"block.down_proj: groups of 48 .* 64 inputs"):
        Linear(site(48, torch.float32).at("down_proj"), 64, 48)
