"""Expert-parallel layers on three ranks, which are threads here and exchange tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.waiting import WAIT_SECONDS
from torch import Tensor, nn

from interposer import Communicator, ExpertsSpec, Ranks, Site
from interposer.records import CommunicatorEntry
from interposer_ops.layers.moe.experts import Experts, PlainExperts
from interposer_ops.layers.moe.placement import ExpertParallel, ExpertPlacement
from interposer_ops.layers.moe.sharded_experts import (
    ExpertParallelExperts,
    TensorParallelExperts,
    shard_experts,
)

MakeSite = Callable[..., Site]
RANKS, EXPERTS, HIDDEN, INNER, TOP_K = 3, 7, 16, 8, 2
SPEC = ExpertsSpec(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_experts=EXPERTS,
    top_k=TOP_K,
    activation="silu",
)
MEETING = Barrier(RANKS, timeout=WAIT_SECONDS)
HELD: list[Any] = [None] * RANKS
# Of both sides: sums of 16 and 8 products, of two experts and of three ranks are less than 32
# float32 roundings of 2**-24.
BOUND = 2.0**-18


class Threads(Communicator):
    """Collectives of threads, in the order of the ranks."""

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        parts = self._held((x, x.split(list(sent))))
        received_parts = [parts_of_rank[self.ranks.rank] for _, parts_of_rank in parts]
        assert [len(part) for part in received_parts] == list(received)
        return torch.cat(received_parts)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        assert len(x) == sizes[self.ranks.rank]
        return torch.cat(self._held(x))

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum(self._held(x), torch.zeros_like(x))

    def close(self) -> None:
        """Share nothing."""

    def _held(self, value: Any) -> list[Any]:
        HELD[self.ranks.rank] = value
        MEETING.wait()
        values = list(HELD)
        MEETING.wait()
        return values


THREADS = CommunicatorEntry(
    "threads",
    f"{__name__}:Threads",
    collectives=("all_to_all", "all_gather", "all_reduce"),
    score=99.0,
)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(layer: Experts, expert_ids: Sequence[int]) -> None:
    for seed, parameter in enumerate(layer.parameters()):
        matrices = numbers(EXPERTS, *parameter.shape[1:], seed=seed) / 4
        parameter.data.copy_(matrices[list(expert_ids)])
    layer.finalize()


def layers_of(make_site: MakeSite, settings: ExpertParallel) -> list[ExpertParallelExperts]:
    layers = []
    for rank in range(RANKS):
        site = make_site("mlp.experts", torch.float32, THREADS)
        resolver: Any = site.resolver
        where = (0,) * RANKS, ("cpu",) * RANKS
        resolver.ranks = Ranks(rank, RANKS, *where, group=object(), experts=settings)
        layer = shard_experts(site, SPEC)
        assert type(layer) is ExpertParallelExperts
        fill(layer, layer.local_expert_ids)
        layers.append(layer)
    return layers


def together(layers: Sequence[ExpertParallelExperts], *inputs: Tensor) -> list[Tensor]:
    with ThreadPoolExecutor(RANKS) as pool:
        return [future.result() for future in [pool.submit(layer, *inputs) for layer in layers]]


def routing(num_tokens: int, last: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.rand(num_tokens, last, generator=torch.Generator().manual_seed(num_tokens))
    ids = draws.argsort(-1)[:, :TOP_K].to(torch.int32)
    shares = numbers(num_tokens, TOP_K, seed=4).softmax(-1)
    return numbers(num_tokens, HIDDEN, seed=5), shares, ids


@pytest.mark.landing(3)
@pytest.mark.parametrize("redundant", [0, 1, 6])
@pytest.mark.parametrize("from_tokens", [0, 1], ids=["added up", "sent"])
def test_expert_parallel_results_match_one_layer(
    make_site: MakeSite, redundant: int, from_tokens: int
) -> None:
    reference = Experts(make_site("mlp.experts", torch.float32), SPEC)
    fill(reference, range(EXPERTS))
    layers = layers_of(make_site, ExpertParallel(redundant, from_tokens))
    # Fewer tokens than ranks, experts without rows, and ranks without.
    for num_tokens, last in ((1, EXPERTS), (2, 2), (7, EXPERTS), (20, 3)):
        inputs = routing(num_tokens, last)
        results = together(layers, *inputs)
        assert all(torch.equal(result, results[0]) for result in results)
        expected = reference(*inputs)
        assert float((results[0] - expected).abs().max()) <= BOUND * float(expected.abs().max())
    counts = [layer.routes.counts() for layer in layers]
    ids = torch.cat([routing(*drawn)[2] for drawn in ((1, EXPERTS), (2, 2), (7, EXPERTS), (20, 3))])
    assert counts == [torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()] * RANKS


def test_copies_of_an_expert_share_rows_round_robin(make_site: MakeSite) -> None:
    layers = layers_of(make_site, ExpertParallel(redundant_experts=2))
    ids = torch.zeros(100, 1, dtype=torch.int32)
    row_counts = [int((layer.routes.local_indices(ids) >= 0).sum()) for layer in layers]
    assert sorted(row_counts) == [0, 50, 50]
    ranks, at = layers[0].routes.locate(ids)
    for rank, layer in enumerate(layers):
        local_ids = layer.routes.local_indices(ids)
        assert torch.equal(local_ids >= 0, ranks == rank)
        assert torch.equal(local_ids[ranks == rank], at[ranks == rank])
        is_empty = not local_ids[local_ids >= 0].numel()
        assert is_empty or layer.local_expert_ids[int(local_ids.max())] == 0


def test_a_new_placement_gives_the_same_results(make_site: MakeSite) -> None:
    layers = layers_of(make_site, ExpertParallel(dispatch_tokens=1))
    assert [layer.local_expert_ids for layer in layers] == [(0, 1, 2), (3, 4), (5, 6)]
    inputs = routing(9)
    before = together(layers, *inputs)[0]
    placement = ExpertPlacement(EXPERTS, ((6, 1, 0), (3, 2), (5, 4)))
    for layer in layers:
        layer.routes.set_placement(placement)
        assert layer.routes.counts() == [0] * EXPERTS
        # With the weights of its new experts it computes the same.
        fresh = Experts(make_site("mlp.experts", torch.float32), layer.spec)
        fill(fresh, layer.local_expert_ids)
        layer.operands = fresh.operands
    assert [layer.local_expert_ids for layer in layers] == list(placement.ranks)
    ranges = [layer.shard.ranges for layer in layers]
    assert ranges == [((6, 7), (1, 2), (0, 1)), ((3, 4), (2, 3)), ((5, 6), (4, 5))]
    for layer, rank_ranges in zip(layers, ranges, strict=True):
        assert {place: shard.ranges for place, shard in layer.slices.items()} == {
            ("", "gate_up_proj"): rank_ranges,
            ("", "down_proj"): rank_ranges,
        }
    after = together(layers, *inputs)[0]
    assert float((after - before).abs().max()) <= BOUND * float(before.abs().max())


def test_notes_report_placement_and_dispatch(make_site: MakeSite) -> None:
    def notes(settings: ExpertParallel, size: int, spec: ExpertsSpec = SPEC) -> str:
        site = make_site("mlp.experts", torch.float32)
        resolver: Any = site.resolver
        resolver.ranks = Ranks(0, size, (0,) * size, ("cpu",) * size, experts=settings)
        assert type(shard_experts(site, spec)) is ExpertParallelExperts
        return str([note for choice, _ in resolver.choices.values() for note in choice.notes])

    assert "ranks hold 3, 2, 2 of 7 experts and 0 redundant" in notes(ExpertParallel(), 3)
    assert "added up, which moves least, as a token reaches 1.7 of 3" in notes(ExpertParallel(), 3)
    dispatching = notes(ExpertParallel(), 7)
    assert "sent to their experts from 1024 of a step on, which moves least" in dispatching
    requested = notes(ExpertParallel(dispatch_tokens=8), 3)
    assert "from 8 of a step on, as requested" in requested
    assert "the host reads the number of rows" in requested


class Blocks(PlainExperts):
    """Experts whose stored form is known only after loading."""

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        super().create_weights(layer, site, spec)
        for parameter in layer.parameters():
            parameter.any_form = True  # type: ignore[attr-defined]


class Mixed(PlainExperts):
    """Experts of which the first is stored otherwise than the others."""

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        for expert in range(spec.num_experts):
            inner = nn.Module()
            inner.register_parameter(f"weight{expert == 0}", nn.Parameter(torch.empty(2)))
            layer.add_module(str(expert), inner)


@pytest.mark.parametrize(
    ("method", "reason"),
    [(Blocks, "stored experts is known only after loading"), (Mixed, "not stored in one form")],
)
def test_experts_that_cannot_be_placed_say_why(
    make_site: MakeSite, method: type[PlainExperts], reason: str
) -> None:
    site = make_site("model.layers.3.mlp.experts", torch.float32)
    resolver: Any = site.resolver
    resolver.ranks = Ranks(1, 2, (0, 0), ("cpu", "cpu"), experts=ExpertParallel())
    resolver.scheme = SimpleNamespace(experts_method=lambda _: method())
    assert type(shard_experts(site, SPEC)) is Experts
    placed, cut = resolver.notes
    assert placed.startswith("experts of model.layers.mlp.experts are not placed whole: ")
    assert reason in placed
    assert cut.startswith("every rank computes all of model.layers.mlp.experts")


def test_experts_are_tensor_parallel_by_default(make_site: MakeSite) -> None:
    site = make_site("mlp.experts", torch.float32)
    resolver: Any = site.resolver
    resolver.ranks = Ranks(1, 2, (0, 0), ("cpu", "cpu"))
    assert type(shard_experts(site, SPEC)) is TensorParallelExperts
