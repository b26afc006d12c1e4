"""Experts in every format of linear layers compute what those layers do, one expert at a time.

Dimensions: T tokens, K chosen experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from interposer import Config, ExpertsSpec, PluggableLayer, Resolver, Site, current_registry, place
from interposer.records import SchemeEntry, load_target
from interposer_ops.layers.expert_loop import LinearExperts
from interposer_ops.layers.experts import Experts
from interposer_quantization.plugin import interposer_records

PREFIX = "model.layers.0.mlp.experts"
SPEC = ExpertsSpec(
    hidden_size=128,
    intermediate_size=128,
    num_experts=3,
    top_k=2,
    activation="silu",
    projections=("gate_proj", "up_proj", "down_proj"),
)


def examples() -> Iterator[Any]:
    """Yield settings of every scheme that stores linear layers."""
    for record in interposer_records():
        if isinstance(record, SchemeEntry) and record.method != "mxfp4":
            for label, settings in load_target(record.examples)().items():
                yield pytest.param({"quant_method": record.method, **settings}, id=f"{record.method}: {label}")


def resolver_of(settings):
    resolver = Resolver(current_registry(), place().device, Config(tables=False, canary="off"))
    resolver.choose_scheme(settings)
    return resolver

def built(resolver, dtype: torch.dtype) -> Experts:
    layer = Experts(Site(resolver, PREFIX, dtype), SPEC)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.copy_(numbers(parameter, generator))
    return layer


def numbers(parameter: torch.nn.Parameter, generator: torch.Generator) -> torch.Tensor:
    """Return what may stand in a parameter; layers that are fused share what they have to."""
    if hasattr(parameter, "sample"):
        return parameter.sample(generator)
    if getattr(parameter, "per_part", False):
        return torch.full(parameter.shape, 0.75).to(parameter.dtype)
    if parameter.dtype.is_floating_point:
        return (torch.rand(parameter.shape, generator=generator) + 0.5).to(parameter.dtype)
    limits = torch.iinfo(parameter.dtype)
    return torch.randint(
        limits.min, limits.max, parameter.shape, generator=generator, dtype=parameter.dtype
    )


@pytest.mark.parametrize("settings", [*examples()])
def test_experts_are_linear_layers(settings: Mapping[str, Any]) -> None:
    resolver = resolver_of(settings)
    layer, stored = built(resolver, torch.float32), built(resolver, torch.float32)
    if not isinstance(layer.method.method, LinearExperts):
        print("AT ONCE", type(layer.method.method).__name__)
        pytest.skip(type(layer.method.method).__name__)
    ops = sorted({c.request.name for c, p in resolver.choices.values() if p[-1].endswith("_proj") and c.request.kind=="kernel"})
    print(type(layer.method.pairs[0][0].method).__name__ if hasattr(layer.method,'pairs') else type(layer.method.method.pairs[0][0].method).__name__, ops)
    for each in layer.modules():
        if isinstance(each, PluggableLayer):
            each.finalize()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 128, generator=generator)
    weights = torch.rand(5, 2, generator=generator)
    ids = torch.rand(5, 3, generator=generator).argsort(-1)[:, :2].to(torch.int32)
    found = layer(x, weights, ids)
    expected = torch.zeros(5, 128, dtype=torch.float64)
    for token, choice in torch.ones_like(ids).nonzero().tolist():
        row, expert = x[token : token + 1], int(ids[token, choice])
        pair = layer.method.method.pairs[expert]
        first, second = stored.method.method.pairs[expert]
        projected = pair[0](row)
        exact = product(first, row)
        assert (projected - exact).abs().max() <= 1e-5 * exact.abs().max()
        hidden = layer.method.method.loop.activate(projected)
        expected[token] += weights[token, choice].double() * product(second, hidden)[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert expected.abs().max() > 1


def product(layer, x):
    """Return the float64 product of what the method says of its input and of its weight."""
    return layer.method.dequantized_input(layer, x) @ layer.method.dequantized(layer).T
