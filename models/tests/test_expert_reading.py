"""What a rank reads of a file of experts: the pages of its own, and hardly any of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models.tests.test_rank_reading import AROUND, mapped_bytes
from safetensors.torch import save_file
from torch import nn

import interposer_ops.plugin
from interposer import Capability, Config, Device, ExpertsSpec, Ranks, Registry, Resolver, Site
from interposer.tooling import Plugins
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.weights import Weights
from interposer_ops.layers.divided_experts import share_experts
from interposer_ops.layers.expert_placement import ExpertParallel, ExpertPlacement
from interposer_ops.layers.placed_experts import PlacedExperts

EXPERTS, HIDDEN, INNER = 5, 256, 4096
NAMES = ("gate", "up", "down")
EXPERT_BYTES = 3 * HIDDEN * INNER * 4


def site_of(rank: int, count: int) -> Site:
    registry = Registry(Plugins.of(interposer_ops.plugin))
    device = Device("cpu", "cpu", "test", Capability("x86_64"))
    where = (0,) * count, ("cpu",) * count
    ranks = Ranks(rank, count, *where, experts=ExpertParallel()) if count > 1 else None
    config = Config(canary="off", tables=False)
    return Site(Resolver(registry, device, config, ranks=ranks), "experts", torch.float32)


class Mixture(nn.Module):
    """Experts alone."""

    def __init__(self, site: Site, is_stacked: bool) -> None:
        super().__init__()
        spec = ExpertsSpec(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_experts=EXPERTS,
            top_k=2,
            activation="silu",
            projections=None if is_stacked else NAMES,
        )
        self.experts = share_experts(site, spec)


@pytest.fixture(scope="module", params=[True, False], ids=["one tensor", "a tensor each"])
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Checkpoint:
    root = tmp_path_factory.mktemp("experts")
    (root / "config.json").write_text(json.dumps({}))
    tensors = {}
    for expert in range(EXPERTS):
        for name in NAMES:
            shape = (HIDDEN, INNER) if name == "down" else (INNER, HIDDEN)
            tensors[f"experts.{expert}.{name}.weight"] = torch.full(shape, float(expert))
    if request.param:
        down, gates = (
            torch.stack([tensors[f"experts.{e}.{name}.weight"] for e in range(EXPERTS)])
            for name in ("down", "up")
        )
        tensors = {"experts.down_proj": down, "experts.gate_up_proj": torch.cat((gates, gates), 1)}
    save_file(tensors, root / "model.safetensors")
    return Checkpoint.open(root)


def watched(checkpoint: Checkpoint, touched: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint, and note how much of each comes into memory."""
    (shard,) = checkpoint.shards
    for name, tensor in checkpoint.stream():
        before = mapped_bytes(shard)
        yield name, tensor
        touched.append(mapped_bytes(shard) - before)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_rank_reads_its_own_experts(checkpoint: Checkpoint, count: int) -> None:
    is_stacked = "experts.down_proj" in checkpoint.names()
    with torch.device("meta"):
        model = Mixture(site_of(count - 1, count), is_stacked)
    weights, touched = Weights(model, "cpu"), list[int]()
    weights.load(watched(checkpoint, touched), "test", names=checkpoint.names())
    layer: Any = model.experts
    held = layer.held if count > 1 else tuple(range(EXPERTS))
    around = 2 * len(touched) * AROUND  # both ends of each tensor
    assert 0.9 * len(held) * EXPERT_BYTES <= sum(touched) <= len(held) * EXPERT_BYTES + around
    assert [float(one[0, 0]) for one in layer.operands[0]] == list(held)


def test_a_rank_reads_the_experts_that_come_to_it(checkpoint: Checkpoint) -> None:
    is_stacked = "experts.down_proj" in checkpoint.names()
    with torch.device("meta"):
        model = Mixture(site_of(1, 2), is_stacked)
    weights, touched = Weights(model, "cpu"), list[int]()
    names = checkpoint.names()
    weights.load(checkpoint.stream(), "test", names=names)
    layer = model.experts
    assert isinstance(layer, PlacedExperts)
    assert layer.held == (3, 4)
    before = layer.operands[0]
    placement = ExpertPlacement(EXPERTS, ((4, 1, 2), (3, 0)))
    moved = weights.relocate({layer: placement}, watched(checkpoint, touched), names, "test")
    assert 0.9 * 2 * EXPERT_BYTES <= sum(touched) <= 2 * EXPERT_BYTES + 2 * len(touched) * AROUND
    assert [float(one[0, 0]) for one in layer.operands[0]] == [3.0, 0.0]
    # In place, so that what was captured with the operands sees them.
    assert (moved, layer.operands[0] is before) == ((), True)
    touched.clear()
    other = ExpertPlacement(EXPERTS, ((1, 4, 2), (3, 0)))  # which changes the other rank alone
    weights.relocate({layer: other}, watched(checkpoint, touched), names, "test")
    assert sum(touched) == 0
    assert layer.routes.placement == other
