"""Experts stay in the blocks of the file on a host, and are dequantized once elsewhere.

Dimensions: T tokens, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from tests.gguf_models import make, write
from torch import nn

from interposer import (
    Config,
    ExpertsMethod,
    ExpertsSpec,
    PluggableLayer,
    Resolver,
    Site,
    current_registry,
    explain,
    place,
)
from interposer.errors import CheckpointError
from interposer_engine import load
from interposer_gguf._block_formats import FORMATS
from interposer_gguf._experts import BlocksExperts, DequantizedExperts
from interposer_gguf._scheme import GGUF
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.experts import Experts

PREFIX = "model.layers.0.mlp.experts"
PARTS = ("gate_proj", "up_proj", "down_proj")
SPEC = ExpertsSpec(
    hidden_size=256,
    intermediate_size=256,
    num_experts=3,
    top_k=2,
    activation="silu",
    projections=PARTS,
)
# As files whose names end in _M have them; the last one has numbers.
MIXED = {
    "one format": ("q4_k", "q4_k", "q4_k"),
    "two formats": ("q4_k", "q4_k", "q6_k"),
    "three formats": ("q8_0", "q5_1", None),
}


def resolver_of(formats: tuple[str | None, ...]) -> Resolver:
    tensors = {
        f"{PREFIX}.{expert}.{part}": stored_as
        for expert in range(SPEC.num_experts)
        for part, stored_as in zip(PARTS, formats, strict=True)
        if stored_as is not None
    }
    scheme = GGUF.parse({"quant_method": "gguf", "tensors": tensors})
    return Resolver(current_registry(), place().device, Config(tables=False), scheme)


def filled(layer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        sample = getattr(parameter, "sample", None)
        numbers = torch.randn(parameter.shape, generator=generator) / 16
        parameter.data.copy_(numbers if sample is None else sample(generator))


def finalize_all(layer: nn.Module, last: Experts | ExpertsMethod) -> None:
    for module in layer.modules():
        if isinstance(module, PluggableLayer) and module is not layer:
            module.finalize()
    if isinstance(last, Experts):
        last.finalize()
    else:
        last.finalize(layer)


def matrices(layer: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of the linear layers, ``[E, 2 I, H]`` and ``[E, H, I]`` float64."""
    weights = []
    for module in layer.modules():
        if isinstance(module, Linear):
            weight = module.method.dequantized(module)
            weights.append(module.get_parameter("weight").double() if weight is None else weight)
    return torch.stack(weights[::2]), torch.stack(weights[1::2])


@pytest.mark.landing(1)
@pytest.mark.parametrize("formats", MIXED.values(), ids=MIXED)
def test_both_methods_agree_with_the_dequantized_blocks(formats: tuple[str | None, ...]) -> None:
    resolver = resolver_of(formats)
    site = Site(resolver, PREFIX, torch.float32)
    layer, expected = Experts(site, SPEC), torch.zeros(3, 256, dtype=torch.float64)
    assert isinstance(layer.method, BlocksExperts)
    filled(layer)
    gate_up, down = matrices(layer)
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(3, 256, generator=generator), torch.rand(3, 2, generator=generator)
    ids = torch.tensor([[0, 2], [2, 1], [2, -1]], dtype=torch.int32)
    for token, choice in (ids >= 0).nonzero().tolist():
        gate, up = (gate_up[ids[token, choice]] @ x[token].double()).chunk(2)
        hidden = nn.functional.silu(gate) * up
        expected[token] += weights[token, choice].double() * (down[ids[token, choice]] @ hidden)
    largest = expected.abs().max()
    finalize_all(layer, layer)
    actual = layer(x, weights, ids)
    assert (actual - expected).abs().max() <= 1e-5 * largest
    method, holder = DequantizedExperts(resolver.scheme.formats), nn.Module()  # type: ignore[union-attr]
    method.create_weights(holder, site, SPEC)
    copy_blocks(site, holder)
    for given, held in zip(method.dequantized(holder), (gate_up, down), strict=True):
        assert torch.equal(given, held)
    kernel, operands = method.finalize(holder)
    actual = kernel(x, *operands, weights, ids, "silu")
    assert (actual - expected).abs().max() <= 1e-5 * largest
    assert list(holder.parameters()) == []


def copy_blocks(site: Site, holder: nn.Module) -> None:
    """Fill the parameters of all experts with those of the linear layers of each."""
    layer = Experts(site, SPEC)
    filled(layer)
    linears = [module for module in layer.modules() if isinstance(module, Linear)]
    for index, module in enumerate(linears):
        for parameter in module.parameters():
            names: tuple[str, ...] = getattr(parameter, "parts", tuple(module.parts))
            for part, rows in zip(names, parameter.chunk(len(names)), strict=True):
                holder.get_parameter(part).data[index // 2] = rows


@pytest.mark.parametrize("way", [BlocksExperts, DequantizedExperts])
def test_blocks_that_are_not_finite_are_refused(way: type[BlocksExperts]) -> None:
    resolver = resolver_of(MIXED["two formats"])
    site, layer = Site(resolver, PREFIX, torch.float32), nn.Module()
    assert isinstance(resolver.scheme, GGUF)
    method = way(resolver.scheme.formats)
    method.create_weights(layer, site, SPEC)
    filled(layer)
    parameters = [parameter for name, parameter in layer.named_parameters() if "q6_k" in name]
    blocks = parameters[1].data if parameters else layer.get_parameter("down_proj").data[1]
    blocks[3, FORMATS["q6_k"].halves[0] : FORMATS["q6_k"].halves[0] + 2] = 0xFF
    with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj\.q6_k: holds a scale"):
        finalize_all(layer, method)


def test_a_file_is_planned_for_its_device(tmp_path: Path) -> None:
    make(tmp_path / "source", "qwen3_moe")
    path = tmp_path / "model.gguf"
    write(tmp_path / "source", path, "qwen3_moe", gguf.GGMLQuantizationType.Q8_0)
    here = explain(load(path, dtype="float32", cache_tokens=64, max_sequences=1))
    rows = {row.choice.request.name: row for row in here.rows}
    assert "fused_experts" not in rows
    assert rows["moe_permute"].choice.waits
    ops_on_h100 = {row.choice.request.name for row in explain(path, "h100").rows}
    assert "fused_experts" in ops_on_h100
    assert "moe_permute" not in ops_on_h100
