"""Experts in every format of linear layers compute what those layers do, one expert at a time.

Dimensions: T tokens, K chosen experts, H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from interposer import (
    Config,
    ExpertsSpec,
    PluggableLayer,
    Resolver,
    Site,
    current_registry,
    place,
)
from interposer.errors import CheckpointError
from interposer.records import SchemeEntry, load_target
from interposer_ops.experts import activated
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.experts import Experts, gates_first
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
# One op computes all experts of these; the last one is of other layers.
AT_ONCE = {
    "auto-round: 4 bits",
    "auto-round: 4 bits, words of AWQ",
    "auto-round: 8 bits for some",
    "awq: symmetric",
    "compressed-tensors: float8 in blocks",
    "compressed-tensors: float8 in blocks, inputs per token",
    "compressed-tensors: float8, inputs not quantized",
    "compressed-tensors: packed int4 per group",
    "fp8: blocks",
    "fp8: blocks of 64 by 32",
    "fp8: blocks, powers of two",
    "gptq: 4 bits",
    "gptq: 8 bits for some",
    "inc: 4 bits",
    "modelopt: 8 bits per block, weights only",
    "torchao: 8-bit floats, weights only",
    "modelopt: mixed, in config.json",
}


def examples() -> Iterator[Any]:
    """Yield settings of every scheme of linear layers."""
    for record in interposer_records():
        if isinstance(record, SchemeEntry) and record.method != "mxfp4":
            for label, settings in load_target(record.examples)().items():
                asked = {"quant_method": record.method, **settings}
                name = f"{record.method}: {label}"
                yield pytest.param(asked, name in AT_ONCE, id=name)


def resolver_of(settings: Mapping[str, Any]) -> Resolver:
    config = Config(tables=False, canary="off")
    resolver = Resolver(current_registry(), place().device, config)
    resolver.choose_scheme(settings)
    return resolver


def built(resolver: Resolver, spec: ExpertsSpec) -> Experts:
    """Return experts with random numbers, the same ones every time."""
    layer = Experts(Site(resolver, PREFIX, torch.float32), spec)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.copy_(numbers(parameter, generator))
    return layer


def numbers(parameter: Any, generator: torch.Generator) -> torch.Tensor:
    """Return random values that fit a parameter, others for every layer of the checkpoint."""
    if hasattr(parameter, "sample"):
        return parameter.sample(generator)  # type: ignore[no-any-return]
    if parameter.dtype.is_floating_point:
        return (torch.rand(parameter.shape, generator=generator) + 0.5).to(parameter.dtype)
    limits = torch.iinfo(parameter.dtype)
    sizes = limits.min, limits.max, parameter.shape
    return torch.randint(*sizes, generator=generator, dtype=parameter.dtype)


def finalized(layer: Experts) -> Experts:
    for each in layer.modules():
        if isinstance(each, PluggableLayer):
            each.finalize()
    return layer


def routing(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, weights and ids; one expert gets no token, and one choice is no expert."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_tokens, SPEC.hidden_size, generator=generator)
    weights = torch.rand(num_tokens, SPEC.top_k, generator=generator)
    ids = torch.tensor([[0, 2], [2, 0], [0, -1]], dtype=torch.int32)[:num_tokens]
    return x, weights, ids


def product(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the float64 product of what the method says of its input and of its weight."""
    weight = layer.method.dequantized(layer)
    assert weight is not None
    return layer.method.dequantized_input(layer, x) @ weight.T


@pytest.mark.landing(24)
@pytest.mark.parametrize(("settings", "at_once"), [*examples()])
def test_experts_without_a_fused_op_become_linear_layers(
    settings: Mapping[str, Any], at_once: bool
) -> None:
    resolver = resolver_of(settings)
    stored = built(resolver, SPEC)
    pairs = linear_pairs(stored)
    layer = finalized(built(resolver, SPEC))
    x, weights, ids = routing(3)
    actual, pairs_by_expert = layer(x, weights, ids), linear_pairs(layer)
    assert at_once == (not pairs)
    if at_once:
        matrices = stored.method.dequantized(stored)
        assert matrices is not None
        expected = mixture(matrices, x, weights, ids)
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
        return
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in (ids >= 0).nonzero().tolist():
        row, expert = x[token : token + 1], int(ids[token, choice])
        projected = torch.cat([each(row) for each in pairs_by_expert[expert][:-1]], -1)
        exact = torch.cat([product(each, row) for each in pairs[expert][:-1]], -1)
        assert (projected - exact).abs().max() <= 1e-5 * exact.abs().max()
        # A number halfway between two may go either way, so the same ones are rounded.
        hidden = activated(projected, "silu")
        expected[token] += weights[token, choice].double() * product(pairs[expert][-1], hidden)[0]
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert expected.abs().max() > 1, "nothing is compared"
    assert layer(*(each[:0] for each in (x, weights, ids))).shape == (0, SPEC.hidden_size)


def mixture(
    matrices: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return the output of a float64 MoE layer with silu for the tokens."""
    result = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in (ids >= 0).nonzero().tolist():
        first, second = (each[ids[token, choice]] for each in matrices)
        hidden = activated(first @ x[token].double(), "silu")
        result[token] += weights[token, choice].double() * (second @ hidden)
    return result


def test_experts_with_partial_blocks_become_linear_layers() -> None:
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    layer = built(resolver_of(blocks), replace(SPEC, hidden_size=192))
    assert len(linear_pairs(layer)) == SPEC.num_experts
    assert finalized(layer)(torch.randn(3, 192), *routing(3)[1:]).isfinite().all()


def linear_pairs(layer: Experts) -> list[list[Linear]]:
    """Return the linear layers of each expert, as far as there are some."""
    actual: dict[str, list[Linear]] = {}
    for each in layer.modules():
        if isinstance(each, Linear):
            actual.setdefault(each.prefix.rpartition(".")[0], []).append(each)
    return list(actual.values())


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"biased": True, "alternating": True, "inputs_first": True, "activation": "swiglu_oai"},
        {"biased": True, "activation": "gelu"},
    ],
)
@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_experts_stored_in_one_tensor_are_quantized_matrix_by_matrix(
    method: str, form: dict[str, Any]
) -> None:
    spec = replace(SPEC, projections=None, **form)
    resolver = resolver_of({"quant_method": f"online_{method}"})
    layer = built(resolver, spec)
    for parameter in layer.parameters():
        parameter.data.sub_(1).div_(4)
    matrices = [layer.get_parameter(f"{name}_proj").data.clone() for name in ("gate_up", "down")]
    offsets = [layer._parameters[f"{name}_proj_bias"] for name in ("gate_up", "down")]
    if spec.inputs_first:
        matrices = [matrix.mT.contiguous() for matrix in matrices]
    if spec.alternating:
        matrices[0] = gates_first(matrices[0])
        assert offsets[0] is not None
        offsets[0] = torch.nn.Parameter(gates_first(offsets[0]), False)
    x, weights, ids = routing(3)
    actual = finalized(layer)(x, weights, ids)
    assert list(layer.parameters()) == []
    expected = torch.zeros(x.shape)
    for token, choice in (ids >= 0).nonzero().tolist():
        expert, hidden = int(ids[token, choice]), x[token : token + 1]
        for place_, (matrix, offset) in enumerate(zip(matrices, offsets, strict=True)):
            site = Site(resolver, f"{PREFIX}.down_proj", torch.float32)
            outputs, inputs = matrix.shape[1:]
            linear = Linear(site, inputs, outputs, offset is not None)
            linear.get_parameter("weight").data.copy_(matrix[expert])
            if offset is not None:
                linear.get_parameter("bias").data.copy_(offset[expert])
            linear.finalize()
            hidden = linear(hidden)
            hidden = hidden if place_ else activated(hidden, spec.activation)
        expected[token] += weights[token, choice] * hidden[0]
    assert (actual - expected).abs().max() <= 2e-3 * expected.abs().max()
    assert actual.std() > 0.1


def test_matrix_with_a_value_that_is_not_finite_is_refused() -> None:
    resolver = resolver_of({"quant_method": "online_int8"})
    layer = built(resolver, replace(SPEC, projections=None))
    layer.get_parameter("down_proj").data[1, 2, 3] = torch.inf
    with pytest.raises(CheckpointError, match=r"experts\.down_proj\.weight: holds inf"):
        layer.finalize()


def test_excluded_experts_stay_plain() -> None:
    left_out = {"modules_to_not_convert": [r"model\.layers\.0\.mlp\.experts"]}
    for spec in (SPEC, replace(SPEC, projections=None)):
        resolver = resolver_of({"quant_method": "online_int8", **left_out})
        built(resolver, spec)
        names = [choice.request.name for choice, _ in resolver.choices.values()]
        assert "fused_experts" in names
        assert "int8_linear" not in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integers_multiply_nvfp4_as_the_reference_does(dtype: torch.dtype) -> None:
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    actual = []
    for config in (Config(canary="off"), Config(canary="off", dequantize=False)):
        resolver = Resolver(current_registry(), place().device, config)
        resolver.choose_scheme(settings)
        linear = Linear(Site(resolver, "block.o_proj", dtype), 256, 96, bias=True)
        generator = torch.Generator().manual_seed(3)
        for parameter in linear.parameters():
            parameter.data.copy_(numbers(parameter, generator))
        linear.finalize()
        x = torch.randn(4, 256, generator=generator).to(dtype)
        actual.append(linear(x).double())
        calls = {c.request.name: c for c, _ in resolver.choices.values()}
        assert ("w8a16_linear" in calls) == config.dequantize
        assert calls["nvfp4_linear"].idle == config.dequantize
    # Of a sum of terms of either sign, rounded once.
    bound = torch.finfo(dtype).eps * actual[1].abs() + 1e-5 * actual[1].abs().max()
    assert ((actual[0] - actual[1]).abs() <= bound).all()
