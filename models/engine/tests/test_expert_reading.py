"""A rank reads its own experts from a file, and hardly any bytes of others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from models.engine.tests.test_rank_reading import ReadBytes, control_bytes, first_byte, mapped_bytes
from safetensors.torch import save_file
from torch import nn

import interposer_ops.plugin
from interposer import Capability, Config, Device, ExpertsSpec, Ranks, Registry, Resolver, Site
from interposer.tooling import Plugins
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.weights import Weights
from interposer_ops.layers.moe.placement import ExpertParallel, ExpertPlacement
from interposer_ops.layers.moe.sharded_experts import ExpertParallelExperts, shard_experts

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
        self.experts = shard_experts(site, spec)


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


def control_of(checkpoint: Checkpoint, experts: Sequence[int]) -> int:
    """Return how far ``mapped_bytes`` rises where a plain map reads these experts."""
    (shard,) = checkpoint.shards
    expert_bytes = {"experts.down_proj": EXPERT_BYTES // 3}
    expert_bytes["experts.gate_up_proj"] = 2 * EXPERT_BYTES // 3
    if "experts.down_proj" in checkpoint.names():
        ranges = [
            (first_byte(shard, name) + expert * num_bytes, num_bytes)
            for name, num_bytes in expert_bytes.items()
            for expert in experts
        ]
    else:
        ranges = [
            (first_byte(shard, f"experts.{expert}.{name}.weight"), EXPERT_BYTES // 3)
            for expert in experts
            for name in NAMES
        ]
    return control_bytes(shard, ranges)


def model_of(checkpoint: Checkpoint, rank: int, count: int) -> Mixture:
    with torch.device("meta"):
        return Mixture(site_of(rank, count), "experts.down_proj" in checkpoint.names())


@pytest.mark.landing(3)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_rank_copies_its_own_experts(checkpoint: Checkpoint, count: int) -> None:
    model = model_of(checkpoint, count - 1, count)
    with ReadBytes() as read:
        stream = read.watch(checkpoint.stream())
        Weights(model, "cpu").load(stream, "test", names=checkpoint.names())
    layer: Any = model.experts
    held = layer.local_expert_ids if count > 1 else tuple(range(EXPERTS))
    assert read.num_bytes == len(held) * EXPERT_BYTES
    assert [float(one[0, 0]) for one in layer.operands[0]] == list(held)


def test_a_move_copies_only_experts_that_move_to_this_rank(checkpoint: Checkpoint) -> None:
    model, names = model_of(checkpoint, 1, 2), checkpoint.names()
    weights = Weights(model, "cpu")
    weights.load(checkpoint.stream(), "test", names=names)
    layer = model.experts
    assert isinstance(layer, ExpertParallelExperts)
    assert layer.local_expert_ids == (3, 4)
    before = layer.operands[0]
    placement = ExpertPlacement(EXPERTS, ((4, 1, 2), (3, 0)))
    with ReadBytes() as read:
        stream = read.watch(checkpoint.stream())
        moved = weights.relocate({layer: placement}, stream, names, "test")
    assert read.num_bytes == 2 * EXPERT_BYTES
    assert [float(one[0, 0]) for one in layer.operands[0]] == [3.0, 0.0]
    # In place, so that what was captured with the operands sees them.
    assert (moved, layer.operands[0] is before) == ((), True)
    other = ExpertPlacement(EXPERTS, ((1, 4, 2), (3, 0)))  # which changes the other rank alone
    with ReadBytes() as read:
        weights.relocate({layer: other}, read.watch(checkpoint.stream()), names, "test")
    assert read.num_bytes == 0
    assert layer.routes.placement == other


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/smaps")
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_pages_of_other_experts_are_not_read(checkpoint: Checkpoint, count: int) -> None:
    model, touched = model_of(checkpoint, count - 1, count), list[int]()
    stream = watched(checkpoint, touched)
    Weights(model, "cpu").load(stream, "test", names=checkpoint.names())
    layer: Any = model.experts
    held = layer.local_expert_ids if count > 1 else tuple(range(EXPERTS))
    assert sum(touched) == pytest.approx(control_of(checkpoint, held), rel=0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/smaps")
@pytest.mark.slow
def test_a_move_reads_only_pages_of_experts_that_move_to_this_rank(checkpoint: Checkpoint) -> None:
    model, names, touched = model_of(checkpoint, 1, 2), checkpoint.names(), list[int]()
    weights = Weights(model, "cpu")
    weights.load(checkpoint.stream(), "test", names=names)
    layer: Any = model.experts
    for placement, arriving in (
        (ExpertPlacement(EXPERTS, ((4, 1, 2), (3, 0))), (3, 0)),
        (ExpertPlacement(EXPERTS, ((1, 4, 2), (3, 0))), ()),
    ):
        touched.clear()
        weights.relocate({layer: placement}, watched(checkpoint, touched), names, "test")
        assert sum(touched) == pytest.approx(control_of(checkpoint, arriving), rel=0.2)
