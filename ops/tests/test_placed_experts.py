"""Experts that are whole on three ranks, which are threads here and exchange tensors."""

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
from interposer_ops.layers.divided_experts import DividedExperts, share_experts
from interposer_ops.layers.expert_placement import ExpertParallel, ExpertPlacement
from interposer_ops.layers.experts import Experts, PlainExperts
from interposer_ops.layers.placed_experts import PlacedExperts

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
        found = [own[self.ranks.rank] for _, own in parts]
        assert [len(part) for part in found] == list(received)
        return torch.cat(found)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        assert len(x) == sizes[self.ranks.rank]
        return torch.cat(self._held(x))

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum(self._held(x), torch.zeros_like(x))

    def close(self) -> None:
        """Share nothing."""

    def _held(self, own: Any) -> list[Any]:
        HELD[self.ranks.rank] = own
        MEETING.wait()
        found = list(HELD)
        MEETING.wait()
        return found


THREADS = CommunicatorEntry(
    "threads",
    f"{__name__}:Threads",
    collectives=("all_to_all", "all_gather", "all_reduce"),
    score=99.0,
)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(layer: Experts, held: Sequence[int]) -> None:
    for seed, parameter in enumerate(layer.parameters()):
        whole = numbers(EXPERTS, *parameter.shape[1:], seed=seed) / 4
        parameter.data.copy_(whole[list(held)])
    layer.finalize()


def layers_of(make_site: MakeSite, settings: ExpertParallel) -> list[PlacedExperts]:
    found = []
    for rank in range(RANKS):
        site = make_site("mlp.experts", torch.float32, THREADS)
        resolver: Any = site.resolver
        where = (0,) * RANKS, ("cpu",) * RANKS
        resolver.ranks = Ranks(rank, RANKS, *where, group=object(), experts=settings)
        layer = share_experts(site, SPEC)
        assert type(layer) is PlacedExperts
        fill(layer, layer.held)
        found.append(layer)
    return found


def together(layers: Sequence[PlacedExperts], *inputs: Tensor) -> list[Tensor]:
    with ThreadPoolExecutor(RANKS) as pool:
        return [each.result() for each in [pool.submit(one, *inputs) for one in layers]]


def routing(num_tokens: int, last: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.rand(num_tokens, last, generator=torch.Generator().manual_seed(num_tokens))
    ids = draws.argsort(-1)[:, :TOP_K].to(torch.int32)
    shares = numbers(num_tokens, TOP_K, seed=4).softmax(-1)
    return numbers(num_tokens, HIDDEN, seed=5), shares, ids


@pytest.mark.parametrize("redundant", [0, 1, 6])
@pytest.mark.parametrize("from_tokens", [0, 1], ids=["added up", "sent"])
def test_expert_parallel_results_match_one_layer(
    make_site: MakeSite, redundant: int, from_tokens: int
) -> None:
    whole = Experts(make_site("mlp.experts", torch.float32), SPEC)
    fill(whole, range(EXPERTS))
    layers = layers_of(make_site, ExpertParallel(redundant, from_tokens))
    # Fewer tokens than ranks, experts without rows, and ranks without.
    for num_tokens, last in ((1, EXPERTS), (2, 2), (7, EXPERTS), (20, 3)):
        inputs = routing(num_tokens, last)
        found = together(layers, *inputs)
        assert all(torch.equal(one, found[0]) for one in found)
        expected = whole(*inputs)
        assert float((found[0] - expected).abs().max()) <= BOUND * float(expected.abs().max())
    counts = [layer.routes.counts() for layer in layers]
    ids = torch.cat([routing(*drawn)[2] for drawn in ((1, EXPERTS), (2, 2), (7, EXPERTS), (20, 3))])
    assert counts == [torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()] * RANKS


def test_copies_of_an_expert_share_rows_round_robin(make_site: MakeSite) -> None:
    layers = layers_of(make_site, ExpertParallel(redundant_experts=2))
    ids = torch.zeros(100, 1, dtype=torch.int32)
    held = [int((layer.routes.own(ids) >= 0).sum()) for layer in layers]
    assert sorted(held) == [0, 50, 50]
    ranks, at = layers[0].routes.places(ids)
    for rank, layer in enumerate(layers):
        own = layer.routes.own(ids)
        assert torch.equal(own >= 0, ranks == rank)
        assert torch.equal(own[ranks == rank], at[ranks == rank])
        assert not own[own >= 0].numel() or layer.held[int(own.max())] == 0


def test_a_new_placement_gives_the_same_results(make_site: MakeSite) -> None:
    layers = layers_of(make_site, ExpertParallel(dispatch_tokens=1))
    assert [layer.held for layer in layers] == [(0, 1, 2), (3, 4), (5, 6)]
    inputs = routing(9)
    before = together(layers, *inputs)[0]
    placement = ExpertPlacement(EXPERTS, ((6, 1, 0), (3, 2), (5, 4)))
    for layer in layers:
        layer.routes.take(placement)
        assert layer.routes.counts() == [0] * EXPERTS
        # With the weights of its new experts it computes the same.
        fresh = Experts(make_site("mlp.experts", torch.float32), layer.spec)
        fill(fresh, layer.held)
        layer.operands = fresh.operands
    assert [layer.held for layer in layers] == list(placement.ranks)
    ranges = [layer.cut.ranges for layer in layers]
    assert ranges == [((6, 7), (1, 2), (0, 1)), ((3, 4), (2, 3)), ((5, 6), (4, 5))]
    for layer, own in zip(layers, ranges, strict=True):
        assert {place: one.ranges for place, one in layer.slices.items()} == {
            ("", "gate_up_proj"): own,
            ("", "down_proj"): own,
        }
    found = together(layers, *inputs)[0]
    assert float((found - before).abs().max()) <= BOUND * float(before.abs().max())


def test_notes_report_placement_and_dispatch(make_site: MakeSite) -> None:
    def notes(settings: ExpertParallel, size: int, spec: ExpertsSpec = SPEC) -> str:
        site = make_site("mlp.experts", torch.float32)
        resolver: Any = site.resolver
        resolver.ranks = Ranks(0, size, (0,) * size, ("cpu",) * size, experts=settings)
        assert type(share_experts(site, spec)) is PlacedExperts
        return str([note for choice, _ in resolver.choices.values() for note in choice.notes])

    assert "ranks hold 3, 2, 2 of 7 experts and 0 redundant" in notes(ExpertParallel(), 3)
    assert "added up, which moves least, as a token reaches 1.7 of 3" in notes(ExpertParallel(), 3)
    few = notes(ExpertParallel(), 7)
    assert "sent to their experts from 1024 of a step on, which moves least" in few
    asked = notes(ExpertParallel(dispatch_tokens=8), 3)
    assert "from 8 of a step on, as asked for" in asked
    assert "read on the host" in asked


class Blocks(PlainExperts):
    """Experts that are held in whatever form they are stored."""

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
    [(Blocks, "held in whatever form they are stored"), (Mixed, "not stored in one form")],
)
def test_experts_that_cannot_be_placed_say_why(
    make_site: MakeSite, method: type[PlainExperts], reason: str
) -> None:
    site = make_site("model.layers.3.mlp.experts", torch.float32)
    resolver: Any = site.resolver
    resolver.ranks = Ranks(1, 2, (0, 0), ("cpu", "cpu"), experts=ExpertParallel())
    resolver.scheme = SimpleNamespace(experts_method=lambda _: method())
    assert type(share_experts(site, SPEC)) is Experts
    placed, cut = resolver.notes
    assert placed.startswith("experts of model.layers.mlp.experts are not placed whole: ")
    assert reason in placed
    assert cut.startswith("every rank computes all of model.layers.mlp.experts")


def test_experts_are_tensor_parallel_by_default(make_site: MakeSite) -> None:
    site = make_site("mlp.experts", torch.float32)
    resolver: Any = site.resolver
    resolver.ranks = Ranks(1, 2, (0, 0), ("cpu", "cpu"))
    assert type(share_experts(site, SPEC)) is DividedExperts
