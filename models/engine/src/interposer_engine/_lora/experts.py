"""LoRA for MoE layers: experts are computed as two matmuls, and adapters add to both.

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
from interposer_engine._lora.layers import NONE, Handle, LowRank, Members, StepAdapters
from interposer_ops.layers.moe.dispatcher import ExpertDispatcher, LocalDispatcher
from interposer_ops.layers.moe.experts import (
    Experts,
    GroupedExperts,
    PlainExperts,
    interleaved,
    row_experts,
)
from interposer_ops.layers.moe.router import Router
from interposer_ops.layers.moe.sequential_experts import ExpertLoop, ExpertProjections


class ReplacedForward:
    """Replacement for the forward function of a layer, until ``remove`` is called."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self._layer = layer
        # An instance attribute takes precedence over the method of the class.
        vars(layer)["forward"] = forward

    def remove(self) -> None:
        """Restore the forward function of the layer's class."""
        del vars(self._layer)["forward"]


class AdaptedRouter(LowRank):
    """Adds adapters to the logits of a router, before experts are chosen."""

    def attach(self, layer: nn.Module) -> Handle:  # type: ignore[override]
        """Add adapters to the router, until the handle is removed."""
        return ReplacedForward(layer, lambda x: self._choose(layer, x))

    def _choose(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        router: Router = layer
        x = x.to(router.dtype)
        logits: Tensor = router.bound.function(x, *router.operands)  # type: ignore[arg-type]
        self.add(x, self.adapter_ids(len(x)), logits)
        return router.choose(logits)


class Parts(Protocol):
    """The two matmuls of an MoE layer as separate steps, so that adapters can add in between.

    Attributes:
        dispatcher: sorts rows by expert.
        activate: computes ``[M, I]`` from ``[M, 2 I]``.
        interleaves: gate and up outputs alternate in the ``2 I`` outputs; otherwise all gate
            outputs come first.
    """

    @property
    def dispatcher(self) -> ExpertDispatcher:
        """The dispatcher that sorts token rows by expert."""
        ...

    @property
    def activate(self) -> Callable[[Tensor], Tensor]:
        """The activation function between the two matmuls."""
        ...

    @property
    def interleaves(self) -> bool:
        """Whether gate and up outputs alternate in the first matmul's result."""
        ...

    def first(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Compute gate and up projections, ``[M, 2 I]`` from ``[M, H]``."""
        ...

    def second(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Compute the down projection, ``[M, H]`` from ``[M, I]``."""
        ...


class LoopParts:
    """The two matmuls of experts that are linear layers, computed one expert after another."""

    interleaves = False

    def __init__(self, loop: ExpertLoop, pairs: Sequence[ExpertProjections]) -> None:
        self.dispatcher, self.activate = loop.dispatcher, loop.activate
        self._firsts, self._seconds = zip(*pairs, strict=True)

    def first(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Compute gate and up projections, ``[M, 2 I]`` from ``[M, H]``."""
        return _in_turn(self._firsts, rows, starts)

    def second(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Compute the down projection, ``[M, H]`` from ``[M, I]``."""
        return _in_turn(self._seconds, rows, starts)


class PlainParts:
    """The two matmuls of unquantized experts, computed by grouped GEMMs.

    If the layer's kernel uses packed matrices, plain copies are kept in addition.
    """

    def __init__(self, site: Site, layer: Experts, method: PlainExperts) -> None:
        spec, bound = layer.spec, method.bound
        names = "gate_up", "gate_up_bias", "down", "down_bias"
        operands_by_name = dict(zip(names, layer.operands, strict=True))
        if bound.prepare is not None:
            if bound.restore is None or spec.biased:
                fault = f"the kernel {bound.choice.chosen.name} keeps only in a packed form"
                raise _refusal(layer, fault)
            hidden, intermediate = spec.hidden_size, spec.intermediate_size
            kind: Any = {"dtype": site.dtype, "device": operands_by_name["gate_up"].device}
            into = {
                "gate_up": torch.empty(spec.num_experts, 2 * intermediate, hidden, **kind),
                "down": torch.empty(spec.num_experts, hidden, intermediate, **kind),
            }
            bound.restore(**operands_by_name, into=into)
            operands_by_name = {**dict.fromkeys(names), **into}
        self._grouped_gemms = GroupedExperts(site, spec)
        self.dispatcher = LocalDispatcher(site, spec)
        self.activate = self._grouped_gemms.activate
        self.interleaves = self.activate.interleaves
        operands: Any = self._grouped_gemms.operands(**operands_by_name)
        self._gate_up, self._gate_up_bias, self._down, self._down_bias = operands

    def first(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Compute gate and up projections, ``[M, 2 I]`` from ``[M, H]``."""
        result = self._grouped_gemms.first.function(rows, self._gate_up, starts.long())
        return _with_bias(result, self._gate_up_bias, starts)

    def second(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Compute the down projection, ``[M, H]`` from ``[M, I]``."""
        result = self._grouped_gemms.second.function(rows, self._down, starts.long())
        return _with_bias(result, self._down_bias, starts)


class AdaptedExperts:
    """Computes MoE experts as separate matmuls, and adds adapters to the results of both.

    Attributes:
        members: the matrices of each adapter, as in ``LowRank``.
        choices: kernel choices of the adapters.
    """

    def __init__(
        self, site: Site, layer: Experts, members: Members, step: StepAdapters, device: str
    ) -> None:
        self.prefix, self._step, self._num_experts = site.prefix, step, layer.spec.num_experts
        self._parts = _parts(site, layer)
        places = {place: None for member in members for place in member}
        down = {place for place in places if place.is_last}
        self._first = self._sum(site, members, places.keys() - down, step, device)
        self._second = self._sum(site, members, down, step, device)
        sums = [low_rank for low_rank in (self._first, self._second) if low_rank is not None]
        self.choices: list[Choice] = [choice for low_rank in sums for choice in low_rank.choices]
        self.members = [
            {place: m for low_rank in sums for place, m in low_rank.members[number].items()}
            for number in range(len(members))
        ]

    def attach(self, layer: nn.Module) -> Handle:
        """Add adapters to the experts, until the handle is removed."""
        return ReplacedForward(layer, self._forward)

    def _forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Compute the forward of the MoE experts, with adapters added to both matmuls."""
        parts = self._parts
        rows, starts, receipt = parts.dispatcher.prepare(x, weights, expert_ids)
        ids = self._row_ids(self._step.of_rows(len(x), self.prefix), starts, receipt[0])
        projected = parts.first(rows, starts)
        if self._first is not None:
            # Adapters add to gate and up outputs in halves, not to alternating ones.
            gate_up = torch.zeros_like(projected) if parts.interleaves else projected
            self._first.add(rows, ids, gate_up)
            if parts.interleaves:
                projected = projected + interleaved(gate_up)
        hidden = parts.activate(projected)
        outputs = parts.second(hidden, starts)
        if self._second is not None:
            self._second.add(hidden, ids, outputs)
        return parts.dispatcher.finalize(outputs, receipt)

    def _row_ids(self, ids: Tensor, starts: Tensor, positions: Tensor) -> Tensor:
        """Return the adapter-matrix number of each row, int64 ``[M]``; -1 for none.

        Args:
            ids: adapter of each token, ``[T]``.
            positions: row of each choice, ``[T, K]``; -1 for a choice without a row.
        """
        num_rows = positions.numel()
        # Choices without a row write to an extra entry, which is dropped.
        adapters = ids.new_full((num_rows + 1,), NONE)
        places = torch.where(positions < 0, num_rows, positions).long()
        adapters[places] = ids[:, None].expand_as(places)
        adapters = adapters[:-1]
        experts = row_experts(starts, num_rows)
        has_matrices = (adapters >= 0) & (experts >= 0)
        return torch.where(has_matrices, adapters * self._num_experts + experts, NONE)

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
    """Return the two matmuls of an MoE layer as separate steps.

    Raises: ConfigError: rows are sent to other ranks, or one kernel computes the complete layer.
    """
    if layer.dispatcher is not None:
        raise _refusal(layer, "tokens are sent to other ranks for")
    if type(layer.kernel) is ExpertLoop:
        return LoopParts(layer.kernel, layer.operands[0])
    # Methods that dequantize stored experts wrap a plain method.
    method: Any = layer.method
    while not isinstance(method, PlainExperts):
        method = getattr(method, "method", None)
        if method is None:
            raise _refusal(layer, "one kernel computes at once in the format of this checkpoint")
    return PlainParts(site, layer, method)


def _refusal(layer: Experts, fault: str) -> ConfigError:
    return ConfigError(
        f"{layer.prefix} takes no adapters: these are experts that {fault}. Try: a checkpoint with "
        "plain experts, quantized by load(..., quantization='int8'), or merge_and_unload() of PEFT"
    )


def _in_turn(layers: Sequence[Callable[[Tensor], Tensor]], rows: Tensor, starts: Tensor) -> Tensor:
    groups = [
        layer(rows[start:end])
        for layer, (start, end) in zip(layers, pairwise(starts.tolist()), strict=True)
        if start < end
    ]
    outputs = torch.cat(groups) if groups else layers[0](rows[:0])
    # Rows of choices without an expert on this rank come last.
    return torch.cat((outputs, outputs.new_zeros(len(rows) - len(outputs), outputs.shape[1])))


def _with_bias(rows: Tensor, bias: Tensor | None, starts: Tensor) -> Tensor:
    return rows if bias is None else rows + bias[row_experts(starts, len(rows)).clamp(min=0)]
