"""Rows of tokens sent to the ranks that hold their experts, and back.

Dimensions: T tokens, K chosen experts, M rows, H hidden size, E experts of all ranks, N ranks, C
copies of an expert at most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interposer import ExpertsSpec, Site
from interposer_ops.experts._expert_permutation import moe_permute, moe_unpermute
from interposer_ops.layers.divided_linear import chosen_communicator, uncallable
from interposer_ops.layers.expert_placement import ExpertPlacement
from interposer_ops.layers.expert_stages import Dispatched, ExpertDispatcher

__all__ = ["RankDispatcher"]

EXCHANGE = "exchange"
"""Below the prefix of a layer, the place of collectives that no decode step calls."""


class ExpertRoutes:
    """The ways to the experts of one layer, and how many rows have taken them.

    Where an expert has copies, its rows take them in turn.

    Attributes:
        placement: the one in force.
        rank: of this process.
    """

    def __init__(self, placement: ExpertPlacement, rank: int) -> None:
        self.placement, self.rank = placement, rank
        places = sum(map(len, placement.ranks)) - placement.num_experts
        self._most = min(len(placement.ranks), 1 + places)
        # ``[E]``, then ``[E, C]``: ranks, numbers there, and numbers of those of this rank, or -1.
        self._copies, self._ranks, self._numbers, self._own = self._tables()
        self._counts = torch.zeros(placement.num_experts, dtype=torch.int64, device="cpu")
        self._one = torch.ones(1, dtype=torch.int64, device="cpu")

    def move(self, device: torch.device | str) -> None:
        """Hold tables and counts on a device; doing so twice is the same as once."""
        names = ("_copies", "_ranks", "_numbers", "_own", "_counts", "_one")
        for name in names:
            setattr(self, name, getattr(self, name).to(device))

    @torch.inference_mode()  # in which tensors of either mode can be written
    def take(self, placement: ExpertPlacement) -> None:
        """Let experts be where another placement has as many of them, and count anew.

        Tables are written in place, so that graphs see them.
        """
        self.placement = placement
        held = self._copies, self._ranks, self._numbers, self._own
        for table, new in zip(held, self._tables(), strict=True):
            table.copy_(new)
        self.forget()

    def count(self, expert_ids: Tensor) -> None:
        """Add the rows of a step, ``[T, K]``, to the counts."""
        flat = expert_ids.reshape(-1)
        self._counts.index_add_(0, flat, self._one.expand(len(flat)))

    def counts(self) -> list[int]:
        """Return how many rows each expert got, ``[E]``."""
        return list(map(int, self._counts.tolist()))

    @torch.inference_mode()
    def forget(self) -> None:
        """Count from 0."""
        self._counts.zero_()

    def own(self, expert_ids: Tensor) -> Tensor:
        """Return the number of each expert on this rank ``[T, K]`` int32, -1 of those elsewhere."""
        return self._own.view(-1)[self._index(expert_ids)]

    def places(self, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rank of each choice and the number of its expert there, ``[T, K]`` int32."""
        index = self._index(expert_ids)
        return self._ranks.view(-1)[index], self._numbers.view(-1)[index]

    def _index(self, expert_ids: Tensor) -> Tensor:
        """Return which entry of ``[E, C]`` each choice takes."""
        ids = expert_ids.long()
        if self._most == 1:
            return ids
        turns = torch.arange(len(ids), device=ids.device)[:, None] + ids
        return ids * self._most + turns % self._copies[ids]

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places = self.placement.places
        filled = [[*own, *own[:1] * (self._most - len(own))] for own in places]
        both = torch.tensor(filled, dtype=torch.int32, device="cpu")
        ranks, numbers = both.unbind(-1)
        own = torch.where(ranks == self.rank, numbers, -1)
        copies = torch.tensor([len(own) for own in places], device="cpu")
        return copies, ranks.contiguous(), numbers.contiguous(), own.contiguous()


class RankDispatcher(ExpertDispatcher):
    """Sends the rows of this rank's tokens over a communicator to the ranks of their experts.

    A token goes once to each rank that holds some of its experts, with its weights. What these
    return is added up there, and what the ranks send back is added up here, in float32 in the order
    of the ranks. How many rows go where is read on the host.

    Args:
        spec: of the experts that this rank holds.
    """

    def __init__(self, site: Site, spec: ExpertsSpec, routes: ExpertRoutes, rows: int) -> None:
        """Choose the communicators for so many ``rows`` of each rank."""
        ranks = site.resolver.ranks
        assert ranks is not None
        self.routes, self.num_ranks, self.held = routes, ranks.size, spec.num_experts
        hidden, top_k = spec.hidden_size, spec.top_k
        sizes = {"hidden_size": hidden, "top_k": top_k}
        self.permute = site.bind(moe_permute, **sizes, num_experts=self.held, index_dtype="int32")
        self.unpermute = site.bind(moe_unpermute, **sizes, weights_dtype="float32")
        merged = {"hidden_size": hidden, "top_k": ranks.size}
        self.merge = site.bind(moe_unpermute, **merged, weights_dtype="float32")
        at = site.at(EXCHANGE)
        asked = ((1, torch.int64), (2 * top_k * rows, torch.int32), (hidden * rows, site.dtype))
        found = [chosen_communicator(at, "all_to_all", width, kind)[1] for width, kind in asked]
        counted, routed, sent = (uncallable if one is None else one.all_to_all for one in found)
        self.count_exchange, self.routing_exchange, self.row_exchange = counted, routed, sent

    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Return the rows that the ranks have for the experts of this one, in their order."""
        top_k, size = expert_ids.shape[1], self.num_ranks
        ranks, numbers = self.routes.places(expert_ids)
        every = torch.arange(size, device=x.device, dtype=ranks.dtype)
        wanted = (ranks[:, None] == every[:, None]).any(-1)  # [T, N]
        to, tokens = wanted.t().nonzero(as_tuple=True)
        counts = wanted.sum(0)[:, None]
        received = self.count_exchange(counts, [1] * size, [1] * size).flatten().tolist()
        sent = counts.flatten().tolist()
        there = torch.where(ranks[tokens] == to[:, None], numbers[tokens], -1)
        routing = torch.cat((there, weights[tokens].contiguous().view(torch.int32)), 1)
        routing = self.routing_exchange(routing, sent, received)
        rows = self.row_exchange(x[tokens], sent, received)
        ids, shares = routing[:, :top_k].contiguous(), routing[:, top_k:].contiguous()
        rows, positions, starts = self.permute(rows, ids, self.held)
        places = ranks.new_full((len(x), size), -1)
        places[tokens, to] = torch.arange(len(tokens), device=x.device, dtype=places.dtype)
        receipt = positions, shares.view(torch.float32), places, sent, received
        return Dispatched(rows[: int(starts[-1])], starts, receipt)

    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        """Return ``[T, H]``, the results of this rank's tokens."""
        positions, shares, places, sent, received = receipt
        sums = self.unpermute(rows, positions, shares)
        back = self.row_exchange(sums, received, sent)
        ones = torch.ones(places.shape, device=back.device)
        return self.merge(back, places, ones)
