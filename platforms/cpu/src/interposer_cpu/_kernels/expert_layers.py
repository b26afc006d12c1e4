"""Experts that are linear layers, of which one call of the compiled library computes all.

Dimensions: T tokens, H hidden size, K chosen experts, E experts.
"""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any, final

import torch
from torch.compiler import is_compiling

from interposer import ExpertsSpec, Site
from interposer_cpu._kernels.experts import routed_rows
from interposer_cpu._kernels.fusion import ForwardHooks, activation_number, input_coding
from interposer_cpu._kernels.interface import FLOAT32, TYPES
from interposer_cpu.native import library
from interposer_ops.layers.expert_loop import ExpertLoop
from interposer_ops.layers.expert_stages import ExpertDispatcher, GatedActivation
from interposer_ops.layers.experts import Experts
from interposer_ops.layers.linear import Linear, MergedLinear

_LAYERS = (Linear, MergedLinear)


@final
class NativeExperts(Experts):
    """The experts of an ``ExpertLoop`` in one call, and float32 between their projections.

    Experts that one kernel computes are left to it, and so are those whose layers are of other
    classes, hold kernels that are not declared in ``fusion``, or have hooks, and those of a
    dispatcher.
    """

    def __init__(
        self, site: Site, spec: ExpertsSpec, dispatcher: ExpertDispatcher | None = None
    ) -> None:
        super().__init__(site, spec, dispatcher)
        self._fused: _FusedExperts | None = None

    def finalize(self) -> None:
        """Find out whether one call can compute what the method wants called."""
        super().finalize()
        self._fused = None
        if self.dispatcher is None and type(self.kernel) is ExpertLoop:
            self._fused = _FusedExperts.of(self.kernel, self.operands[0])

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return what the chosen experts make of ``x`` ``[T, H]``, added up by ``weights``."""
        fused = self._fused
        if (
            fused is None
            or is_compiling()
            or x.dtype not in TYPES
            or weights.dtype is not FLOAT32
            or any(fused.hooks.dicts)
            or (table := fused.table()) is None
        ):
            return super().forward(x, weights, expert_ids)
        x, weights, expert_ids = routed_rows(x, weights, expert_ids)
        count, width = x.shape
        out = torch.empty(count, width, dtype=x.dtype)
        library().expert_layers(
            table.data_ptr(),
            *fused.words,
            x.data_ptr(),
            out.data_ptr(),
            weights.data_ptr(),
            expert_ids.data_ptr(),
            TYPES[x.dtype],
            fused.activation,
            len(table),
            count,
            expert_ids.shape[1],
            x.stride(0),
            weights.stride(0),
            expert_ids.stride(0),
        )
        return out


class _FusedExperts:
    """The linear layers of all experts, and the addresses of what they hold.

    Attributes:
        words: of both input codings.
    """

    def __init__(self, layers: list[Any], activation: int) -> None:
        self.layers, self.activation = layers, activation
        self.hooks = ForwardHooks(layers)
        self.words: tuple[int, ...] = ()
        self._held: list[Any] = []
        self._table: torch.Tensor | None = None

    @classmethod
    def of(cls, loop: ExpertLoop, pairs: tuple[Any, ...]) -> _FusedExperts | None:
        """Return those of a loop's pairs, None where they are not what one call computes."""
        activate: Any = loop.activate
        layers = list(chain.from_iterable(pairs))
        if type(activate) is not GatedActivation or not all(type(x) in _LAYERS for x in layers):
            return None
        number = activation_number(activate.activate, activate.options)
        return None if number is None else cls(layers, number)

    def table(self) -> torch.Tensor | None:
        """Return int64 ``[E, 2]`` addresses of packed weights, None where a kernel has none.

        Weights are exchanged, and kernels with them, without a word to the layer around them.
        """
        held = [layer.operands for layer in self.layers]
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            self._held = held
            self._table = self._read()
        return self._table

    def _read(self) -> torch.Tensor | None:
        found = [{input_coding(layer.kernel) for layer in self.layers[half::2]} for half in (0, 1)]
        if any(len(codings) > 1 or None in codings for codings in found):
            return None
        codings: list[Any] = [*found[0], *found[1]]
        if any(coding.is_static for coding in codings):
            return None
        self.words = (*codings[0].words, *codings[1].words)
        addresses = [layer.operands[0][0].data_ptr() for layer in self.layers]
        return torch.tensor(addresses, dtype=torch.int64).view(-1, 2)
