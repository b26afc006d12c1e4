"""Layers of every installed scheme are loaded and exchanged as the contract of methods promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.landing import landing_sample
from torch import nn

from interposer import (
    Config,
    ExpertsSpec,
    Resolver,
    Rule,
    SchemeEntry,
    Site,
    current_registry,
    place,
)
from interposer.errors import CheckpointError
from interposer.records import load_target
from interposer_engine._checkpoint.dequantize import DequantizedLinear
from interposer_engine._checkpoint.tensors import places_of
from interposer_engine._checkpoint.updates import Offer
from interposer_engine._checkpoint.weights import Weights
from interposer_gguf import plugin as gguf
from interposer_nf4 import plugin as nf4
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.experts import Experts
from interposer_quantization import plugin as standard

PREFIX, MIXTURE = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"
IN_FEATURES, OUT_FEATURES = 512, 96
EXPERTS = ExpertsSpec(
    hidden_size=128,
    intermediate_size=64,
    num_experts=4,
    top_k=2,
    activation="silu",
    biased=True,
    alternating=True,
)

Tensors = dict[str, torch.Tensor]


def examples() -> list[Any]:
    """Return class and settings of every example that the records name."""
    return [
        pytest.param(load_target(record.target), settings, id=f"{record.method} {label}")
        for record in standard.interposer_records()
        if isinstance(record, SchemeEntry) and record.examples
        for label, settings in load_target(record.examples)().items()
    ]


def linear_examples() -> list[Any]:
    """Return those of linear layers, of the plugins of the SDK besides."""
    return [
        pytest.param(load_target(record.target), settings, id=f"{record.method} {label}")
        for plugin in (standard, gguf, nf4)
        for record in plugin.interposer_records()
        if isinstance(record, SchemeEntry) and record.examples
        for label, settings in load_target(record.examples)().items()
        if load_target(record.target).parse(settings).linear_method(PREFIX, ("q_proj",))
    ]


def built(scheme: Any, settings: Mapping[str, Any], device: str) -> Linear | Experts:
    """Return a linear layer, or experts if the scheme leaves linear layers plain."""
    resolver = Resolver(
        current_registry(), place().device, Config(canary="off"), scheme.parse(settings)
    )
    parsed = resolver.scheme
    assert parsed is not None
    is_linear = parsed.linear_method(PREFIX, ("q_proj",)) is not None
    with torch.device(device):
        if not is_linear:
            return Experts(Site(resolver, MIXTURE, torch.float32), EXPERTS)
        return Linear(Site(resolver, PREFIX, torch.float32), IN_FEATURES, OUT_FEATURES, bias=True)


def number(parameter: nn.Parameter, generator: torch.Generator) -> torch.Tensor:
    """Return numbers that may stand in a parameter, by the rule of the conformance suite."""
    sample = getattr(parameter, "sample", None)
    if sample is not None:
        return sample(generator)  # type: ignore[no-any-return]
    if parameter.is_floating_point():
        return (0.5 + torch.rand(parameter.shape, generator=generator)).to(parameter.dtype)
    shape = (*parameter.shape, parameter.itemsize)
    content = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return content.view(parameter.dtype).reshape(parameter.shape)


def result(layer: Linear | Experts) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, Linear):
        return layer(torch.randn(3, IN_FEATURES, generator=generator))  # type: ignore[no-any-return]
    routing = torch.tensor([[0.5, 0.25]] * 3), torch.tensor([[0, 1], [3, 2], [1, 3]])
    x = torch.randn(3, EXPERTS.hidden_size, generator=generator)
    return layer(x, *routing)  # type: ignore[no-any-return]


def drawn(layer: Linear | Experts, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    places, _ = places_of([layer])
    return {name: number(place.parameter, generator) for name, place in places.items()}


@pytest.mark.landing(8)
@pytest.mark.parametrize(("scheme", "settings"), landing_sample(examples(), every=4))
def test_an_updated_layer_equals_a_loaded_one(scheme: Any, settings: Mapping[str, Any]) -> None:
    first, second = (drawn(built(scheme, settings, "cpu"), seed) for seed in (1, 2))
    layers = [built(scheme, settings, "meta") for _ in range(2)]
    weights = [Weights(nn.ModuleList([layer]), "cpu") for layer in layers]
    for weights_of_layer, tensors in zip(weights, (first, second), strict=True):
        weights_of_layer.load(tensors.items(), "test")
    before, expected = (result(layer) for layer in layers)
    assert not torch.equal(before, expected)
    weights[0].update(Offer(second.items()), "test")
    assert torch.equal(result(layers[0]), expected)
    for name in second:
        if len(second) > 1:
            with pytest.raises(CheckpointError, match="goes together with"):
                weights[0].update(Offer([(name, first[name])]), "test")
    assert torch.equal(result(layers[0]), expected)
    weights[0].update(Offer(first.items()), "test")
    assert torch.equal(result(layers[0]), before)


@pytest.mark.landing(14)
@pytest.mark.parametrize(("scheme", "settings"), landing_sample(examples(), every=4))
def test_loading_neither_changes_nor_keeps_checkpoint_tensors(
    scheme: Any, settings: Mapping[str, Any]
) -> None:
    tensors = drawn(built(scheme, settings, "cpu"), 1)
    bytes_by_name = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    stored = {name: codes.clone() for name, codes in bytes_by_name.items()}
    layer = built(scheme, settings, "meta")
    Weights(nn.ModuleList([layer]), "cpu").load(tensors.items(), "test")
    assert all(torch.equal(bytes_by_name[name], codes) for name, codes in stored.items())
    before = result(layer)
    for codes in bytes_by_name.values():
        codes.zero_()
    assert torch.equal(result(layer), before)


@pytest.mark.parametrize("method", ["online_fp8", "online_int4", "online_int8", "online_w4a8"])
def test_quantizing_while_loading_borrows_the_stored_weight(method: str) -> None:
    scheme = next(
        load_target(record.target)
        for record in standard.interposer_records()
        if isinstance(record, SchemeEntry) and record.method == method
    )
    layer = built(scheme, {}, "meta")
    place = places_of([layer])[0][f"{PREFIX}.weight"]
    parameter = torch.empty(OUT_FEATURES, IN_FEATURES)
    assert place.can_borrow(torch.zeros_like(parameter), parameter)
    assert not place.can_borrow(torch.zeros_like(parameter, dtype=torch.bfloat16), parameter)
    assert not place.can_borrow(torch.zeros(IN_FEATURES, OUT_FEATURES).T, parameter)
    assert not place.can_borrow(torch.zeros(OUT_FEATURES // 2, IN_FEATURES), parameter)
    part = replace(place, stop=OUT_FEATURES // 2)
    assert not part.can_borrow(torch.zeros(OUT_FEATURES // 2, IN_FEATURES), parameter)


@pytest.mark.landing(21)
@pytest.mark.parametrize(("scheme", "settings"), linear_examples())
def test_a_dequantized_layer_equals_the_reference(scheme: Any, settings: Mapping[str, Any]) -> None:
    config = Config(kernels={"*": Rule(prefer=["reference"])}, canary="off")
    parsed = scheme.parse(settings)
    site = Site(Resolver(current_registry(), place().device, config, parsed), PREFIX, torch.float32)
    reference, layer = (Linear(site, IN_FEATURES, OUT_FEATURES, bias=True) for _ in range(2))
    verdict = layer.method.dequantizable()
    if not verdict:
        assert verdict.reason
        return
    layer.method = DequantizedLinear(layer.method, site, IN_FEATURES, OUT_FEATURES)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in reference.named_parameters():
        parameter.data.copy_(number(parameter, generator))
        layer.get_parameter(name).data.copy_(parameter)
    reference.finalize()
    layer.finalize()
    assert {name for name, _ in layer.named_parameters()} <= {"weight", "bias"}
    expected = result(reference)
    error = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(result(layer), expected, rtol=0, atol=error)
