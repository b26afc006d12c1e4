"""The standard layers, built through a resolver, against the references of their ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from interposer import ExpertsSpec, Kernel, Site, current_registry, place
from interposer.errors import ConfigError, UnknownNameError
from interposer_ops.activations._activations_torch import (
    gelu_and_mul_functional,
    silu_and_mul_functional,
)
from interposer_ops.embedding import embedding
from interposer_ops.experts import fused_experts
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.moe.experts import Experts
from interposer_ops.layers.moe.router import Router
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.linear import linear
from interposer_ops.norms import fused_add_rms_norm, rms_norm
from interposer_ops.rotary import rotary_table
from interposer_ops.rotary._rotary_torch import rotary_embedding_addcmul
from interposer_testing import layer_trials

MakeSite = Callable[..., Site]
DTYPES = (torch.float32, torch.bfloat16)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def linear_columnwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    assert weight.shape[0] == x.shape[-1], "the weight was not prepared"
    return linear.reference(x, weight.T, bias)


def transpose(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    return {"weight": weight.T.contiguous(), "bias": bias}


COLUMNWISE = Kernel(
    "linear",
    "linear_columnwise",
    f"{__name__}:linear_columnwise",
    prepare=f"{__name__}:transpose",
)
each_kernel = pytest.mark.parametrize("kernels", [(), (COLUMNWISE,)], ids=["plain", "prepared"])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def load(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Fill the parameters with random numbers, finalize, and return what was loaded."""
    loaded = {}
    for seed, (name, parameter) in enumerate(layer.named_parameters()):
        loaded[name] = numbers(*parameter.shape, dtype=parameter.dtype, seed=seed)
        parameter.data.copy_(loaded[name])
    layer.finalize()  # type: ignore[operator]
    return loaded


@both_dtypes
def test_the_norm_matches_its_definition(make_site: MakeSite, dtype: torch.dtype) -> None:
    layer = RMSNorm(make_site("norm", dtype), 48, 1e-3)
    weight = load(layer)["weight"]
    x, residual = numbers(5, 48, dtype=dtype), numbers(5, 48, dtype=dtype, seed=1)
    normal = rms_norm(x, weight, 1e-3)
    assert torch.equal(layer(x), normal)
    for actual, expected in (
        (layer.forward_add(x, None), (normal, x)),
        (layer.forward_add(x, residual), fused_add_rms_norm(x, residual, weight, 1e-3)),
    ):
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


@both_dtypes
@each_kernel
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_matches_torch(
    make_site: MakeSite, dtype: torch.dtype, kernels: tuple[Kernel, ...], bias: bool
) -> None:
    layer = Linear(make_site("mlp.down_proj", dtype, *kernels), 32, 20, bias=bias)
    loaded = load(layer)
    assert set(loaded) == ({"weight", "bias"} if bias else {"weight"})
    for shape in [(3, 32), (2, 3, 32), (0, 32)]:
        x = numbers(*shape, dtype=dtype)
        expected = linear(x, loaded["weight"], loaded.get("bias"))
        torch.testing.assert_close(layer(x), expected)


def test_a_prepared_weight_replaces_the_parameter(make_site: MakeSite) -> None:
    plain = Linear(make_site("proj", torch.float32), 8, 4)
    prepared = Linear(make_site("proj", torch.float32, COLUMNWISE), 8, 4)
    load(plain)
    load(prepared)
    assert [name for name, _ in plain.named_parameters()] == ["weight"]
    assert [name for name, _ in prepared.named_parameters()] == []


@both_dtypes
@each_kernel
def test_a_merged_linear_layer_matches_torch(
    make_site: MakeSite, dtype: torch.dtype, kernels: tuple[Kernel, ...]
) -> None:
    parts = {"q_proj": 24, "k_proj": 8, "v_proj": 8}
    layer = MergedLinear(make_site("attn.qkv_proj", dtype, *kernels), 16, parts, bias=True)
    loaded = load(layer)
    x = numbers(5, 16, dtype=dtype)
    weights, biases = (loaded[name].split([24, 8, 8]) for name in ("weight", "bias"))
    for actual, weight, bias in zip(layer(x).split([24, 8, 8], -1), weights, biases, strict=True):
        torch.testing.assert_close(actual, linear(x, weight, bias))


@both_dtypes
def test_the_embedding_looks_up_rows(make_site: MakeSite, dtype: torch.dtype) -> None:
    layer = Embedding(make_site("embed_tokens", dtype), 11, 6)
    weight = load(layer)["weight"]
    token_ids = torch.tensor([3, 10, 0, 3])
    assert torch.equal(layer(token_ids), embedding(token_ids, weight))


@both_dtypes
@each_kernel
def test_head_with_its_own_weight(
    make_site: MakeSite, dtype: torch.dtype, kernels: tuple[Kernel, ...]
) -> None:
    layer = LMHead(make_site("lm_head", dtype, *kernels), 11, 6)
    weight = load(layer)["weight"]
    hidden = numbers(3, 6, dtype=dtype)
    torch.testing.assert_close(layer(hidden), linear(hidden, weight, None))
    assert len(list(layer.parameters())) == (0 if kernels else 1)


@both_dtypes
@each_kernel
def test_head_tied_to_the_embedding(
    make_site: MakeSite, dtype: torch.dtype, kernels: tuple[Kernel, ...]
) -> None:
    site = make_site("", dtype, *kernels)
    embed = Embedding(site.at("embed_tokens"), 11, 6, site.at("lm_head"))
    head = LMHead(site.at("lm_head"), 11, 6, tied=embed)
    assert head.weight is embed.weight
    weight = load(embed)["weight"]
    head.finalize()
    hidden, token_ids = numbers(3, 6, dtype=dtype), torch.tensor([4, 7])
    torch.testing.assert_close(head(hidden), linear(hidden, weight, None))
    assert torch.equal(embed(token_ids), embedding(token_ids, weight))
    # The head refers to what the embedding holds, and to nothing else.
    assert embed.head_call == (head.kernel, head.operands)
    assert list(head.parameters()) == []


def test_a_head_cannot_be_tied_to_an_embedding_built_without_a_head(make_site: MakeSite) -> None:
    site = make_site("", torch.float32)
    alone = Embedding(site.at("embed_tokens"), 11, 6)
    with pytest.raises(ConfigError, match=r"tied to embed_tokens, .* built without a head"):
        LMHead(site.at("lm_head"), 11, 6, tied=alone)


@pytest.mark.parametrize("layer_id", ["embedding", "lm_head"])
def test_conformance_of_a_table_builds_it_with_a_head_and_without(layer_id: str) -> None:
    ran = {True: 0, False: 0}
    device = place().device
    for trial in layer_trials(current_registry(), device, "interposer-ops", 0, layer_id):
        assert trial.run() == [], str(trial)
        ran[trial.label.endswith((", shared by a head", ", tied"))] += 1
    assert ran[True] == ran[False] > 5


@both_dtypes
@pytest.mark.parametrize("rotary_size", [16, 8])
def test_rotary(make_site: MakeSite, dtype: torch.dtype, rotary_size: int) -> None:
    layer = RotaryEmbedding(make_site("rotary", dtype), 16, rotary_size)
    query, key = numbers(5, 4, 16, dtype=dtype), numbers(5, 2, 16, dtype=dtype, seed=1)
    cos, sin = rotary_table(5, rotary_size, 10000.0)
    expected = rotary_embedding_addcmul(query, key, cos, sin)
    for actual, reference in zip(layer(query, key, cos, sin), expected, strict=True):
        assert torch.equal(actual, reference)


@both_dtypes
@pytest.mark.parametrize(
    ("name", "approximate"),
    [
        ("silu", None),
        ("swish", None),
        ("gelu", "none"),
        ("gelu_new", "tanh"),
        ("gelu_pytorch_tanh", "tanh"),
    ],
)
def test_activation(
    make_site: MakeSite, dtype: torch.dtype, name: str, approximate: str | None
) -> None:
    layer = GatedActivation(make_site("mlp.act", dtype), name, 24)
    x = numbers(5, 48, dtype=dtype)
    gelu, silu = gelu_and_mul_functional, silu_and_mul_functional
    expected = silu(x) if approximate is None else gelu(x, approximate)
    assert torch.equal(layer(x), expected)


def mixture(**changes: Any) -> ExpertsSpec:
    facts = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 4, "top_k": 2}
    return ExpertsSpec(**{**facts, "activation": "swiglu_oai", **changes})


@both_dtypes
@each_kernel
@pytest.mark.parametrize("bias", [False, True])
def test_router(
    make_site: MakeSite, dtype: torch.dtype, kernels: tuple[Kernel, ...], bias: bool
) -> None:
    layer = Router(make_site("mlp.router", dtype, *kernels), 16, 4, 2, renormalize=True, bias=bias)
    loaded = load(layer)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    x = numbers(5, 16, dtype=dtype)
    logits = linear(x.float(), loaded["weight"], loaded.get("bias"))
    weights, ids = layer(x)
    chosen = logits.topk(2)
    assert torch.equal(ids, chosen.indices.to(torch.int32))
    torch.testing.assert_close(weights, chosen.values.softmax(-1))


@both_dtypes
@pytest.mark.parametrize("biased", [False, True])
def test_experts(make_site: MakeSite, dtype: torch.dtype, biased: bool) -> None:
    layer = Experts(make_site("mlp.experts", dtype), mixture(biased=biased))
    loaded = load(layer)
    x, weights = numbers(5, 16, dtype=dtype), numbers(5, 2, seed=1).softmax(-1)
    ids = torch.tensor([[0, 3], [1, 2], [3, 0], [2, 1], [0, 1]])
    expected = fused_experts(
        x,
        loaded["gate_up_proj"],
        loaded.get("gate_up_proj_bias"),
        loaded["down_proj"],
        loaded.get("down_proj_bias"),
        weights,
        ids,
        "swiglu_oai",
    )
    # Two roundings to the dtype, and sums of 16 and 8 terms in float32 in another order.
    units = 2 * torch.finfo(dtype).eps + 24 * torch.finfo(torch.float32).eps
    atol = units * float(expected.abs().max())
    torch.testing.assert_close(layer(x, weights, ids), expected, rtol=0, atol=atol)
    assert list(layer.parameters()) == []


def test_experts_are_stored_in_either_order(make_site: MakeSite) -> None:
    site = make_site("mlp.experts", torch.float32)
    first = Experts(site, mixture(biased=True))
    second = Experts(site, mixture(biased=True, alternating=True, inputs_first=True))
    parameters = {
        name: numbers(*p.shape, seed=n) for n, (name, p) in enumerate(first.named_parameters())
    }
    for name, parameter in first.named_parameters():
        parameter.data.copy_(parameters[name])
    for name, parameter in second.named_parameters():
        tensor = parameters[name]
        if name.startswith("gate_up"):
            tensor = torch.stack((tensor[:, :8], tensor[:, 8:]), 2).flatten(1, 2)
        parameter.data.copy_(tensor.transpose(1, 2) if name.endswith("proj") else tensor)
    matrices = [layer.method.dequantized(layer) for layer in (first, second)]
    for ones, second_matrices in zip(*matrices, strict=True):
        assert torch.equal(ones, second_matrices)
    first.finalize()
    second.finalize()
    routing = numbers(5, 2, seed=9), torch.tensor([[0, 3], [1, 2], [3, 0], [2, 1], [0, 1]])
    x = numbers(5, 16)
    assert torch.equal(first(x, *routing), second(x, *routing))


def test_an_unknown_activation_lists_the_known_ones(make_site: MakeSite) -> None:
    with pytest.raises(UnknownNameError) as raised:
        GatedActivation(make_site("mlp.act", torch.float32), "sillu", 24)
    assert raised.value.known[0] == "silu"
    assert "gelu_pytorch_tanh" in raised.value.known


def test_a_decoder_block_holds_what_is_built_for_it(make_site: MakeSite) -> None:
    hidden_size, eps = 8, 1e-6
    x, stream = numbers(5, hidden_size), numbers(5, hidden_size, seed=1)
    prefixes: dict[str, str] = {}

    class Scaled(nn.Module):
        def __init__(self, site: Site, factor: float) -> None:
            super().__init__()
            prefixes[site.prefix] = type(self).__name__
            self.factor = factor
            self.seen: tuple[Any, ...] = ()

        def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
            self.seen = others
            rows = others[-1] if others else None
            return self.factor * (x if rows is None else x[rows])

    build: Any = DecoderBlock
    block = build(
        make_site("block", torch.float32),
        hidden_size,
        eps,
        lambda at: Scaled(at, 3),
        lambda at: Scaled(at, -2),
    )
    assert type(block) is DecoderBlock
    norms = (block.input_layernorm, block.post_attention_layernorm)
    weights = [load(norm)["weight"] for norm in norms]
    assert list(prefixes) == ["block.self_attn", "block.mlp"]
    for residual in (stream, None):
        for rows in (None, torch.tensor([4, 0])):
            actual, total = block(x, residual, "cos", "sin", "cache", "plan", rows)
            assert block.self_attn.seen == ("cos", "sin", "cache", "plan", rows)
            first = x if residual is None else x + residual
            attended = 3 * rms_norm.reference(first, weights[0], eps)
            expected = first + attended
            if rows is not None:
                expected = expected[rows]
            torch.testing.assert_close(total, expected)
            normed = rms_norm.reference(expected, weights[1], eps)
            torch.testing.assert_close(actual, -2 * normed)
