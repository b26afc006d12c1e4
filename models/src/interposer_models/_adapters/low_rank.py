"""The adapters of one layer, computed by two grouped matmuls for all tokens of a step.

Dimensions: T tokens, I inputs, O outputs of a part, A adapters, R the largest rank, P adapted parts
of a merged layer, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from interposer import Choice, LinearMethod, Site
from interposer_models._adapters.files import Matrices
from interposer_models._adapters.places import AdapterPlace
from interposer_models._adapters.step import StepAdapters
from interposer_ops.lora import lora_expand, lora_shrink

Members = Sequence[Mapping[AdapterPlace, Matrices]]
"""The matrices of each adapter for a layer, by place; empty if the adapter skips the layer."""


@dataclass(frozen=True, slots=True)
class LowRankSum:
    """Kernels and operands of a low-rank sum; platforms that fuse layers read this.

    Attributes:
        shrink: the kernel of ``lora_shrink``.
        first: prepared matrices for ``shrink``, ``[A, P R, I]``.
        expansions: for each part the kernel of ``lora_expand``, prepared matrices, and the first
            column of the output.
    """

    shrink: Callable[..., Tensor]
    first: Any
    expansions: Sequence[tuple[Callable[..., None], Any, int]]


class LowRank:
    """A forward hook that adds the low-rank sums of adapters to the outputs of a layer.

    The first matrices of all parts are stacked, so that one matmul is enough. Matrices of a
    smaller rank are padded with zeros.

    Attributes:
        members: the matrices of each adapter, as views of the stacked matrices.
        choices: kernel choices.
        low_rank: the sum, for platforms that fuse it into a kernel of several layers; None if the
            layer transforms its inputs first.
    """

    low_rank: LowRankSum | None = None

    def __init__(self, site: Site, members: Members, step: StepAdapters, device: str) -> None:
        self.prefix, self._step = site.prefix, step
        places = {place: None for member in members for place in member}
        # The order of the stacked matrices.
        self.places = sorted(places, key=lambda place: place.part)
        self._rank = max(m.rank for member in members for m in member.values())
        self._dtype, self._device = site.dtype, device
        first, second = self._stacked(members)
        self.choices: list[Choice] = []
        self.members = [
            {
                place: Matrices(
                    self._rows(first[number], index)[..., : matrices.rank, :],
                    second[index][number][..., : matrices.rank],
                )
                for index, place in enumerate(self.places)
                if (matrices := member.get(place)) is not None
            }
            for number, member in enumerate(members)
        ]
        # For the kernels, each pair of adapter and expert is one adapter.
        self._bind(site, first.flatten(0, -3), [part.flatten(0, -3) for part in second])

    def _stacked(self, members: Members) -> tuple[Tensor, list[Tensor]]:
        """Stack first matrices to ``[A, P R, I]``, and second ones to ``[A, O, R]`` for each part.

        With experts the shapes are ``[A, E, P R, I]`` and ``[A, E, O, R]``.
        """
        rank, places = self._rank, self.places
        kind: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        experts = places[0].experts
        lead = (len(members),) if experts is None else (len(members), experts)
        first = torch.zeros(*lead, len(places) * rank, places[0].inputs, **kind)
        second = [torch.zeros(*lead, place.outputs, rank, **kind) for place in places]
        for number, member in enumerate(members):
            for index, place in enumerate(places):
                if (matrices := member.get(place)) is not None:
                    self._rows(first[number], index)[..., : matrices.rank, :] = matrices.a
                    second[index][number, ..., : matrices.rank] = matrices.b
        return first, second

    def _rows(self, first: Tensor, index: int) -> Tensor:
        return first[..., index * self._rank : (index + 1) * self._rank, :]

    def _bind(self, site: Site, first: Tensor, second: list[Tensor]) -> None:
        sizes = {"rank": first.shape[1], "num_adapters": len(first)}
        shrinks = site.bind_kernel(lora_shrink, in_features=first.shape[2], **sizes)
        self.choices.append(shrinks.choice)
        self._shrinks = shrinks.function
        self._first: Any = shrinks.prepared(lora_a=first)["lora_a"]
        self._bind_expansions(site, second)
        if not self._takes_codes(self.places[0].layer):
            self.low_rank = LowRankSum(self._shrinks, self._first, self._expansions)

    @staticmethod
    def _takes_codes(layer: nn.Module) -> bool:
        method = getattr(layer, "method", None)
        return isinstance(method, LinearMethod) and method.takes_codes

    def adapter_ids(self, num_rows: int) -> Tensor:
        """Return the adapter of each row that the layer computes, int64 ``[num_rows]``."""
        return self._step.of_rows(num_rows, self.prefix)

    def _bind_expansions(self, site: Site, second: list[Tensor]) -> None:
        self._expansions = []
        for place, matrices in zip(self.places, second, strict=True):
            count, outputs, rank = matrices.shape
            sizes = {"out_features": outputs, "rank": rank, "num_adapters": count}
            expands = site.bind_kernel(lora_expand, **sizes)
            self.choices.append(expands.choice)
            prepared = expands.prepared(lora_b=matrices)["lora_b"]
            self._expansions.append((expands.function, prepared, place.offset))

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        """Add the low-rank sums to ``y`` in place."""
        rows = y.view(-1, y.shape[-1])  # a view, so that ``y`` changes in place
        ids = self.adapter_ids(len(rows))
        self._add(self._shrunk(layer, inputs[0], ids, y.dtype), ids, rows)

    def attach(self, layer: nn.Module) -> RemovableHandle:
        """Add adapters to the layer, until the handle is removed."""
        # Prepended, so that hooks of other libraries see outputs with adapters. A layer that is
        # sharded by inputs takes its adapter before the all-reduce, in its ``summand``.
        target: nn.Module = getattr(layer, "summand", layer)
        return target.register_forward_hook(self, prepend=True)

    def add(self, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Add the low-rank sums of ``x`` to ``rows`` ``[T, O]`` in place.

        Args:
            ids: adapter of each row, ``[T]``.
        """
        self._add(self._shrinks(x, self._first, ids, 1.0), ids, rows)

    def _add(self, shrunk: Tensor, ids: Tensor, rows: Tensor) -> None:
        rank = self._rank
        for index, (expand, matrices, offset) in enumerate(self._expansions):
            part = shrunk[:, index * rank : (index + 1) * rank]
            expand(part, matrices, ids, rows, offset)

    def _shrunk(self, layer: nn.Module, x: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product with the first matrices, ``[T, P R]``, float32 or wider."""
        if self._takes_codes(layer):
            # Scale inputs as the base layer does.
            x = x.to(dtype) * layer.operands[0]  # type: ignore[index]
        return self._shrinks(x.reshape(-1, x.shape[-1]), self._first, ids, 1.0)


class LowRankTable(LowRank):
    """The adapters of an embedding: first matrices are looked up by token id."""

    def _bind(self, site: Site, first: Tensor, second: list[Tensor]) -> None:
        self._first = first
        self._bind_expansions(site, second)

    def _shrunk(self, layer: nn.Module, x: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        # Rows without an adapter look up any entry; the expansion skips these rows.
        rows: Tensor = self._first[ids.clamp(min=0), :, x.flatten()]
        return rows.to(torch.promote_types(dtype, torch.float32))
