"""Mixtures of experts with adapters: the layer in parts, between which adapters add.

Dimensions: T tokens, K chosen experts, M rows of tokens by expert, H hidden size, I intermediate
size, E experts, A adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from interposer import Choice, Site
from interposer.errors import ConfigError
from interposer_models._adapters.low_rank import LowRank, Members
from interposer_models._adapters.step import NONE, Handle, StepAdapters
from interposer_ops.layers.expert_loop import ExpertLoop, Pair
from interposer_ops.layers.expert_stages import (
    ExpertDispatcher,
    GroupedProducts,
    LocalDispatcher,
    interleaved,
    row_experts,
)
from interposer_ops.layers.experts import Experts, PlainExperts, Router


class Forward:
    """Another forward of a layer, until it is removed."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self._layer = layer
        vars(layer)["forward"] = forward

    def remove(self) -> None:
        """Let the layer compute by the forward of its class again."""
        del vars(self._layer)["forward"]


class AdaptedRouter(LowRank):
    """Adds what adapters say to the logits of a router, before experts are chosen by them."""

    def attach(self, layer: nn.Module) -> Handle:  # type: ignore[override]
        """Choose with adapters from now on, until the handle is removed."""
        return Forward(layer, lambda x: self._choose(layer, x))

    def _choose(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        router: Router = layer
        x = x.to(router.dtype)
        logits: Tensor = router.bound.function(x, *router.operands)  # type: ignore[arg-type]
        self.add(x, self.adapter_ids(len(x)), logits)
        return router.choose(logits)


class Parts(Protocol):
    """The base of a layer of experts in parts.

    Attributes:
        dispatcher: puts rows in the order of their experts.
        activate: ``[M, I]`` of ``[M, 2 I]``.
        interleaves: gates and what they act on stand in turn in the ``2 I`` outputs, else all gates
            come first.
    """

    @property
    def dispatcher(self) -> ExpertDispatcher:
        """Return what sorts rows."""
        ...

    @property
    def activate(self) -> Callable[[Tensor], Tensor]:
        """Return what comes between the products."""
        ...

    @property
    def interleaves(self) -> bool:
        """Say how outputs of the first product stand."""
        ...

    def first(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return ``[M, 2 I]`` of ``[M, H]``."""
        ...

    def second(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return ``[M, H]`` of ``[M, I]``."""
        ...


class LoopParts:
    """Experts that are linear layers, one after the other."""

    interleaves = False

    def __init__(self, loop: ExpertLoop, pairs: Sequence[Pair]) -> None:
        self.dispatcher, self.activate = loop.dispatcher, loop.activate
        self._firsts, self._seconds = zip(*pairs, strict=True)

    def first(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return ``[M, 2 I]`` of ``[M, H]``."""
        return _in_turn(self._firsts, rows, starts)

    def second(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return ``[M, H]`` of ``[M, I]``."""
        return _in_turn(self._seconds, rows, starts)


class PlainParts:
    """Unquantized experts, by products of rows in groups.

    Where the layer's kernel holds matrices in a form of its own, they are held once more.
    """

    def __init__(self, site: Site, layer: Experts, method: PlainExperts) -> None:
        spec, bound = layer.spec, method.bound
        names = "gate_up", "gate_up_bias", "down", "down_bias"
        held = dict(zip(names, layer.operands, strict=True))
        if bound.prepare is not None:
            if bound.restore is None or spec.biased:
                what = f"the kernel {bound.choice.chosen.name} holds in a form of its own"
                raise _refused(layer, what)
            count, hidden, inner = spec.num_experts, spec.hidden_size, spec.intermediate_size
            kind: Any = {"dtype": site.dtype, "device": held["gate_up"].device}
            into = {
                "gate_up": torch.empty(count, 2 * inner, hidden, **kind),
                "down": torch.empty(count, hidden, inner, **kind),
            }
            bound.restore(**held, into=into)
            held = {**dict.fromkeys(names), **into}
        self._products = GroupedProducts(site, spec)
        self.dispatcher = LocalDispatcher(site, spec)
        self.activate = self._products.activate
        self.interleaves = self.activate.interleaves
        operands: Any = self._products.operands(**held)
        self._gate_up, self._gate_up_bias, self._down, self._down_bias = operands

    def first(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return ``[M, 2 I]`` of ``[M, H]``."""
        product = self._products.first.function(rows, self._gate_up, starts.long())
        return _offset(product, self._gate_up_bias, starts)

    def second(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return ``[M, H]`` of ``[M, I]``."""
        product = self._products.second.function(rows, self._down, starts.long())
        return _offset(product, self._down_bias, starts)


class AdaptedExperts:
    """Computes experts in parts, and adds what adapters say to both of their projections.

    Attributes:
        held: the matrices of each adapter, as of ``LowRank``.
        choices: of the kernels of adapters.
    """

    def __init__(
        self, site: Site, layer: Experts, members: Members, step: StepAdapters, device: str
    ) -> None:
        self.prefix, self._step, self._count = site.prefix, step, layer.spec.num_experts
        self._parts = _parts(site, layer)
        places = {place: None for member in members for place in member}
        down = {place for place in places if place.is_last}
        self._first = self._sum(site, members, places.keys() - down, step, device)
        self._second = self._sum(site, members, down, step, device)
        sums = [each for each in (self._first, self._second) if each is not None]
        self.choices: list[Choice] = [choice for each in sums for choice in each.choices]
        self.held = [
            {place: m for each in sums for place, m in each.held[number].items()}
            for number in range(len(members))
        ]

    def attach(self, layer: nn.Module) -> Handle:
        """Compute with adapters from now on, until the handle is removed."""
        return Forward(layer, self._forward)

    def _forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return what ``Experts.forward`` does."""
        parts = self._parts
        rows, starts, receipt = parts.dispatcher.prepare(x, weights, expert_ids)
        ids = self._row_ids(self._step.of_rows(len(x), self.prefix), starts, receipt[0])
        projected = parts.first(rows, starts)
        if self._first is not None:
            added = torch.zeros_like(projected) if parts.interleaves else projected
            self._first.add(rows, ids, added)
            if parts.interleaves:
                projected = projected + interleaved(added)
        hidden = parts.activate(projected)
        returned = parts.second(hidden, starts)
        if self._second is not None:
            self._second.add(hidden, ids, returned)
        return parts.dispatcher.finalize(returned, receipt)

    def _row_ids(self, ids: Tensor, starts: Tensor, positions: Tensor) -> Tensor:
        """Return the matrices of each row ``[M]`` int64, -1 where it has none.

        Args:
            ids: ``[T]``, the adapter of each token.
            positions: ``[T, K]``, the row of each choice, -1 of one that has none.
        """
        num_rows = positions.numel()
        # Choices without a row write behind the last one.
        adapters = ids.new_full((num_rows + 1,), NONE)
        places = torch.where(positions < 0, num_rows, positions).long()
        adapters[places] = ids[:, None].expand_as(places)
        adapters = adapters[:-1]
        experts = row_experts(starts, num_rows)
        there = (adapters >= 0) & (experts >= 0)
        return torch.where(there, adapters * self._count + experts, NONE)

    @staticmethod
    def _sum(
        site: Site, members: Members, places: Any, step: StepAdapters, device: str
    ) -> LowRank | None:
        if not places:
            return None
        chosen = [
            {place: m for place, m in member.items() if place in places} for member in members
        ]
        return LowRank(site, chosen, step, device)


def _parts(site: Site, layer: Experts) -> Parts:
    """Return the base of a layer in parts.

    Raises: ConfigError: its rows are sent elsewhere, or one kernel computes all in one.
    """
    if layer.dispatcher is not None:
        raise _refused(layer, "tokens are sent to other ranks for")
    if type(layer.kernel) is ExpertLoop:
        return LoopParts(layer.kernel, layer.operands[0])
    method: Any = layer.method
    while not isinstance(method, PlainExperts):
        method = getattr(method, "method", None)
        if method is None:
            raise _refused(layer, "one kernel computes at once in the format of this checkpoint")
    return PlainParts(site, layer, method)


def _refused(layer: Experts, what: str) -> ConfigError:
    return ConfigError(
        f"{layer.prefix} takes no adapters: these are experts that {what}. Try: a checkpoint with "
        "plain experts, quantized by load(..., quantization='int8'), or merge_and_unload() of PEFT"
    )


def _in_turn(layers: Sequence[Callable[[Tensor], Tensor]], rows: Tensor, starts: Tensor) -> Tensor:
    groups = [
        layer(rows[start:end])
        for layer, (start, end) in zip(layers, pairwise(starts.tolist()), strict=True)
        if start < end
    ]
    found = torch.cat(groups) if groups else layers[0](rows[:0])
    # Choices that have no expert here stand behind the last one.
    return torch.cat((found, found.new_zeros(len(rows) - len(found), found.shape[1])))


def _offset(rows: Tensor, bias: Tensor | None, starts: Tensor) -> Tensor:
    return rows if bias is None else rows + bias[row_experts(starts, len(rows)).clamp(min=0)]
