"""Dispatch of tokens to experts: send rows to their experts, and combine the experts' results.

Dimensions: T tokens, K chosen experts, M rows, H hidden size, E experts (of all ranks), N ranks, C
largest number of copies of an expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interposer import ExpertsSpec, Site
from interposer_ops.experts._expert_permutation import moe_permute, moe_unpermute
from interposer_ops.layers.moe.placement import ExpertPlacement
from interposer_ops.layers.tensor_parallel.collectives import choose_communicator, uncallable

__all__ = ["AllToAllDispatcher", "Dispatched", "ExpertDispatcher", "LocalDispatcher"]

EXCHANGE = "exchange"
"""Site name, below a layer, of collectives that no decode step calls."""


class Dispatched(NamedTuple):
    """Token rows sorted by expert, with the first row of each expert.

    Attributes:
        rows: ``[M, H]``, the rows of each expert are contiguous; M may be 0. Rows after the rows of
            the last expert are padding and are not computed.
        starts: ``[E + 1]`` int32 or int64, the first row of each expert, then the end of the last.
        receipt: the dispatcher's data for returning the rows to their tokens.
    """

    rows: Tensor
    starts: Tensor
    receipt: Any


class ExpertDispatcher(ABC):
    """Sends tokens to their experts and combines the results, on this rank or over several ranks.

    A dispatcher belongs to one ``Experts`` layer. The expert ids are the router's, counted over all
    ranks; the prepared rows are for the experts of this layer only.
    """

    @abstractmethod
    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Collect the token rows that the layer's experts must compute.

        Args:
            x: ``[T, H]``, the tokens of this rank.
            weights: ``[T, K]`` float32.
            expert_ids: ``[T, K]`` int32; -1 means no expert.
        """

    @abstractmethod
    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        """Combine the experts' results into the weighted sum ``[T, H]`` of each token.

        Args:
            rows: ``[M, H]``, the experts' results for the rows of ``prepare``, in the same order.
                Padding rows may hold anything.
            receipt: the receipt of the same ``Dispatched``.
        """


class LocalDispatcher(ExpertDispatcher):
    """Sorts the tokens' rows by expert, for a layer that holds all experts."""

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        self.num_experts = spec.num_experts
        sizes = {"hidden_size": spec.hidden_size, "top_k": spec.top_k}
        self.permute = site.bind(
            moe_permute, **sizes, num_experts=spec.num_experts, index_dtype="int32"
        )
        self.unpermute = site.bind(moe_unpermute, **sizes, weights_dtype="float32")

    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Return one row for each chosen expert of each token."""
        rows, positions, starts = self.permute(x, expert_ids, self.num_experts)
        return Dispatched(rows, starts, (positions, weights))

    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        """Return the weighted sum of the expert results of each token."""
        return self.unpermute(rows, *receipt)


class ExpertRoutes:
    """The location of every expert of one layer, and the number of rows sent to each expert.

    Rows for an expert with several copies are distributed round-robin over the copies.

    Attributes:
        placement: the current placement.
        rank: this process's rank.
    """

    def __init__(self, placement: ExpertPlacement, rank: int) -> None:
        self.placement, self.rank = placement, rank
        num_redundant = sum(map(len, placement.ranks)) - placement.num_experts
        # C is fixed by the number of slots, so that every later placement fits the same tables.
        self._max_copies = min(len(placement.ranks), 1 + num_redundant)
        # Number of copies ``[E]``. Then ``[E, C]`` of each copy: rank, index on that rank, and
        # index on this rank or -1.
        self._copies, self._ranks, self._indices, self._local_indices = self._tables()
        self._counts = torch.zeros(placement.num_experts, dtype=torch.int64, device="cpu")
        self._one = torch.ones(1, dtype=torch.int64, device="cpu")

    def move_to(self, device: torch.device | str) -> None:
        """Move routing tables and counts to a device; moving twice is harmless."""
        names = ("_copies", "_ranks", "_indices", "_local_indices", "_counts", "_one")
        for name in names:
            setattr(self, name, getattr(self, name).to(device))

    @torch.inference_mode()  # in which tensors of either mode can be written
    def set_placement(self, placement: ExpertPlacement) -> None:
        """Switch to another placement with the same number of expert slots, and reset the counts.

        The tables are overwritten in place, so that recorded device graphs read the new values.
        """
        self.placement = placement
        tables = self._copies, self._ranks, self._indices, self._local_indices
        for table, new in zip(tables, self._tables(), strict=True):
            table.copy_(new)
        self.reset_counts()

    def count(self, expert_ids: Tensor) -> None:
        """Count the expert choices ``[T, K]`` of one step."""
        flat = expert_ids.reshape(-1)
        self._counts.index_add_(0, flat, self._one.expand(len(flat)))

    def counts(self) -> list[int]:
        """Return the number of rows sent to each expert, ``[E]``."""
        return list(map(int, self._counts.tolist()))

    @torch.inference_mode()
    def reset_counts(self) -> None:
        """Reset the counts to 0."""
        self._counts.zero_()

    def local_indices(self, expert_ids: Tensor) -> Tensor:
        """Map expert ids to indices on this rank, ``[T, K]`` int32; -1 for experts elsewhere."""
        return self._local_indices.view(-1)[self._index(expert_ids)]

    def locate(self, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map expert ids to ranks and to indices on these ranks, each ``[T, K]`` int32."""
        index = self._index(expert_ids)
        return self._ranks.view(-1)[index], self._indices.view(-1)[index]

    def _index(self, expert_ids: Tensor) -> Tensor:
        """Choose a copy for each chosen expert; return flat indices into ``[E, C]`` tables."""
        ids = expert_ids.long()
        if self._max_copies == 1:
            return ids
        # Round-robin by token number: all ranks choose the same copy without communication.
        turns = torch.arange(len(ids), device=ids.device)[:, None] + ids
        return ids * self._max_copies + turns % self._copies[ids]

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places = self.placement.places
        # Padded to C entries; the padding is never read, as ``_index`` counts the real copies.
        padded = [[*copies, *copies[:1] * (self._max_copies - len(copies))] for copies in places]
        ranks, indices = torch.tensor(padded, dtype=torch.int32, device="cpu").unbind(-1)
        local_indices = torch.where(ranks == self.rank, indices, -1)
        num_copies = torch.tensor([len(copies) for copies in places], device="cpu")
        return num_copies, ranks.contiguous(), indices.contiguous(), local_indices.contiguous()


class AllToAllDispatcher(ExpertDispatcher):
    """Send this rank's tokens to the ranks of their experts, by a communicator's all-to-all.

    Each rank with at least one chosen expert of a token receives the token once, together with the
    routing weights. The receiving rank sums the weighted results of its experts; this rank then
    sums the ranks' results in float32, in rank order. The host reads how many rows go to each rank.

    Args:
        spec: the experts that this rank holds.
    """

    def __init__(self, site: Site, spec: ExpertsSpec, routes: ExpertRoutes, rows: int) -> None:
        """Choose the communicators for messages of up to ``rows`` rows per rank."""
        ranks = site.resolver.ranks
        assert ranks is not None
        self.routes, self.num_ranks, self.num_local = routes, ranks.size, spec.num_experts
        hidden, top_k = spec.hidden_size, spec.top_k
        sizes = {"hidden_size": hidden, "top_k": top_k}
        self.permute = site.bind(
            moe_permute, **sizes, num_experts=self.num_local, index_dtype="int32"
        )
        self.unpermute = site.bind(moe_unpermute, **sizes, weights_dtype="float32")
        merged = {"hidden_size": hidden, "top_k": ranks.size}
        self.merge = site.bind(moe_unpermute, **merged, weights_dtype="float32")
        at = site.at(EXCHANGE)
        # Three messages of different sizes: row counts, routing (ids and weights), and the rows.
        messages = ((1, torch.int64), (2 * top_k * rows, torch.int32), (hidden * rows, site.dtype))
        chosen = [
            choose_communicator(at, "all_to_all", width, dtype)[1] for width, dtype in messages
        ]
        self.count_exchange, self.routing_exchange, self.row_exchange = (
            uncallable if communicator is None else communicator.all_to_all
            for communicator in chosen
        )

    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Exchange rows, and return the rows that all ranks sent to this rank's experts."""
        top_k, size = expert_ids.shape[1], self.num_ranks
        ranks, indices = self.routes.locate(expert_ids)
        all_ranks = torch.arange(size, device=x.device, dtype=ranks.dtype)
        is_sent = (ranks[:, None] == all_ranks[:, None]).any(-1)  # [T, N]
        # all_to_all sends consecutive rows to consecutive ranks, so rows are sorted by rank.
        destinations, tokens = is_sent.t().nonzero(as_tuple=True)
        counts = is_sent.sum(0)[:, None]
        received = self.count_exchange(counts, [1] * size, [1] * size).flatten().tolist()
        sent = counts.flatten().tolist()
        remote_ids = torch.where(ranks[tokens] == destinations[:, None], indices[tokens], -1)
        # Weights travel as int32 bits beside the ids: one message instead of two.
        routing = torch.cat((remote_ids, weights[tokens].contiguous().view(torch.int32)), 1)
        routing = self.routing_exchange(routing, sent, received)
        rows = self.row_exchange(x[tokens], sent, received)
        ids = routing[:, :top_k].contiguous()
        row_weights = routing[:, top_k:].contiguous().view(torch.float32)
        rows, positions, starts = self.permute(rows, ids, self.num_local)
        # For each token and rank, the position of the token's row among the sent rows, or -1.
        places = ranks.new_full((len(x), size), -1)
        places[tokens, destinations] = torch.arange(
            len(tokens), device=x.device, dtype=places.dtype
        )
        receipt = positions, row_weights, places, sent, received
        return Dispatched(rows[: int(starts[-1])], starts, receipt)

    def finalize(self, rows: Tensor, receipt: Any) -> Tensor:
        """Send results back, and sum ``[T, H]`` for this rank's tokens."""
        positions, row_weights, places, sent, received = receipt
        sums = self.unpermute(rows, positions, row_weights)
        results = self.row_exchange(sums, received, sent)
        # The remote ranks have applied the routing weights already.
        ones = torch.ones(places.shape, device=results.device)
        return self.merge(results, places, ones)
