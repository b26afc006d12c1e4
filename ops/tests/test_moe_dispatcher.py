"""Experts in stages against experts by one kernel, on one rank and on two that exchange rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from tests.waiting import WAIT_SECONDS
from torch import Tensor

from interposer import ExpertsSpec, Site
from interposer.errors import RequestError
from interposer.records import LayerEntry
from interposer_ops.experts import moe_permute, moe_unpermute
from interposer_ops.layers.moe.dispatcher import Dispatched, ExpertDispatcher, LocalDispatcher
from interposer_ops.layers.moe.experts import Experts, row_experts

MakeSite = Callable[..., Site]
HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 6, 2
HALF = EXPERTS // 2


class Staged(Experts):
    """Computes in stages what the standard layer does."""

    def __init__(
        self, site: Site, spec: ExpertsSpec, dispatcher: ExpertDispatcher | None = None
    ) -> None:
        super().__init__(site, spec, dispatcher or LocalDispatcher(site, spec))


STAGED = LayerEntry("experts", "staged", f"{__name__}:Staged")


class Exchange:
    """Two ranks in two threads, which give each other what they hold for one another."""

    def __init__(self) -> None:
        self.barrier = Barrier(2, timeout=WAIT_SECONDS)
        self.sent: list[list[Any]] = [[], []]

    def swap(self, rank: int, parts: list[Any]) -> list[Any]:
        """Return the parts that ranks 0 and 1 hold for ``rank``, given its parts for them."""
        self.sent[rank] = parts
        self.barrier.wait()
        received = [self.sent[0][rank], self.sent[1][rank]]
        self.barrier.wait()
        return received


class Exchanged(ExpertDispatcher):
    """Sends rows to the rank that holds their expert, the first half of them or the second."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank = exchange, rank
        self.num_computed = -1

    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        rows, positions, starts = moe_permute(x, expert_ids, EXPERTS)
        counts, middle = starts.diff(), int(starts[HALF])
        parts = (rows[:middle], counts[:HALF]), (rows[middle : int(starts[-1])], counts[HALF:])
        received = self.exchange.swap(self.rank, list(parts))
        sizes = [len(part) for part, _ in received]
        experts = torch.cat([torch.arange(HALF).repeat_interleave(n.long()) for _, n in received])
        order = experts.argsort(stable=True)
        total = torch.stack([n for _, n in received]).sum(0)
        begins = torch.cat((total.new_zeros(1), total.cumsum(0)))
        rows = torch.cat([part for part, _ in received])[order]
        self.num_computed = len(rows)
        return Dispatched(rows, begins, (positions, weights, order, sizes))

    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        positions, weights, order, sizes = receipt
        parts = torch.empty_like(rows).index_copy(0, order, rows).split(sizes)
        returned = torch.cat(self.exchange.swap(self.rank, list(parts)))
        return moe_unpermute(returned, positions, weights)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spec_of(activation: str, biased: bool, **changes: Any) -> ExpertsSpec:
    return ExpertsSpec(
        **{
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_experts": EXPERTS,
            "top_k": TOP_K,
            "activation": activation,
            "biased": biased,
            **changes,
        }
    )


def fill(layer: Experts, chosen: slice = slice(None)) -> Experts:
    """Load those of all experts that the layer holds."""
    for seed, (_, parameter) in enumerate(layer.named_parameters()):
        shape = EXPERTS, *parameter.shape[1:]
        parameter.data.copy_(numbers(*shape, seed=seed, dtype=parameter.dtype)[chosen])
    layer.finalize()
    return layer


def close(actual: Tensor, expected: Tensor, roundings: int) -> None:
    """Compare by roundings to the dtype, and sums of 16 and 8 float32 terms in another order."""
    units = roundings * torch.finfo(actual.dtype).eps + 24 * torch.finfo(torch.float32).eps
    atol = units * float(expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def routing(num_tokens: int, first: int = 0, last: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """Return weights and different ids from ``first`` to ``last`` - 1 for each token."""
    draws = torch.rand(num_tokens, last - first, generator=torch.Generator().manual_seed(3))
    ids = draws.argsort(-1)[:, :TOP_K].to(torch.int32) + first
    return numbers(num_tokens, TOP_K, seed=4).softmax(-1), ids


@pytest.mark.landing(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_stages_equal_one_kernel(
    make_site: MakeSite, dtype: torch.dtype, biased: bool, activation: str
) -> None:
    spec = spec_of(activation, biased, alternating=biased)
    fused = fill(Experts(make_site("mlp.experts", dtype), spec))
    # A model builds the standard layer; the plugin's stands in for it.
    staged = fill(Experts(make_site("mlp.experts", dtype, STAGED), spec))
    assert type(staged) is Staged
    for num_tokens in (0, 1, 7):
        x = numbers(num_tokens, HIDDEN, seed=5, dtype=dtype)
        weights, ids = routing(num_tokens)
        ids[:1, 0] = -1
        # Both projections and both offsets are rounded besides what the one kernel rounds.
        close(staged(x, weights, ids), fused(x, weights, ids), 6)
    assert list(staged.parameters()) == []


@pytest.mark.landing(6)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts"),
    [((7, 3), (0, EXPERTS)), ((5, 0), (0, EXPERTS)), ((4, 2), (HALF, EXPERTS)), ((1, 6), (0, 2))],
    ids=["uneven", "a rank without tokens", "a rank without rows", "experts without rows"],
)
def test_rows_are_sent_to_the_rank_of_their_expert(
    make_site: MakeSite, tokens: tuple[int, int], experts: tuple[int, int], biased: bool
) -> None:
    fused = fill(Experts(make_site("mlp.experts", torch.float32), spec_of("silu", biased)))
    part = spec_of("silu", biased, num_experts=HALF)
    exchange = Exchange()
    senders = [Exchanged(exchange, rank) for rank in range(2)]
    halves = [slice(HALF), slice(HALF, None)]
    layers = [
        fill(Experts(make_site("mlp.experts", torch.float32), part, sender), half)
        for sender, half in zip(senders, halves, strict=True)
    ]
    x = numbers(sum(tokens), HIDDEN, seed=6)
    weights, ids = routing(len(x), *experts)
    inputs = [tensor.split(tokens) for tensor in (x, weights, ids)]
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(layers[rank], *(t[rank] for t in inputs)) for rank in range(2)]
        actual = torch.cat([rank.result() for rank in ranks])
    close(actual, fused(x, weights, ids), 0)
    row_counts = [int((ids < HALF).sum()), int((ids >= HALF).sum())]
    assert [sender.num_computed for sender in senders] == row_counts


def test_padding_rows_belong_to_no_expert() -> None:
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert row_experts(starts, 7).tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert row_experts(starts[:1].expand(4), 2).tolist() == [-1, -1]


def test_an_unknown_activation_is_refused(make_site: MakeSite) -> None:
    site = make_site("mlp.experts", torch.float32, STAGED)
    with pytest.raises(RequestError, match=r"'relu'.*'swiglu_oai'"):
        Experts(site, spec_of("relu", False))
