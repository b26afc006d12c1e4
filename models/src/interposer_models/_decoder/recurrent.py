"""Layers that keep a state of each sequence, and what most of them begin and end with.

Dimensions: T tokens, C channels, W window, H size of what is normalised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer_ops.layers.states import StateBatch, StateLayout
from interposer_ops.norms import gated_rms_norm
from interposer_ops.recurrence import causal_convolution


class RecurrentLayer(nn.Module, ABC):
    """A layer whose cache is a state of fixed size for each sequence."""

    @abstractmethod
    def state_layout(self) -> StateLayout:
        """Return the tensors of one sequence's state."""


class RecurrentMixer(RecurrentLayer):
    """A recurrent layer that stands where attention does, and ends in a gate and a projection."""

    @abstractmethod
    def mixed(
        self, x: Tensor, cache: tuple[Tensor, ...], plan: StateBatch
    ) -> tuple[Tensor, Tensor]:
        """Return what ``x`` ``[T, H]`` and the states make of each token, and its gate."""

    @abstractmethod
    def ended(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return ``[T, H]`` of what ``mixed`` returned, or of some rows of it."""

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cache: tuple[Tensor, ...],
        plan: StateBatch,
        rows: Tensor | None,
    ) -> Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``, or ``[rows, H]`` of the tokens they name."""
        y, gate = self.mixed(x, cache, plan)
        return self.ended(y, gate) if rows is None else self.ended(y[rows], gate[rows])


class Convolution(PluggableLayer):
    """A causal convolution of each channel by itself; see the op ``causal_convolution``.

    Args:
        silu: what it returns goes through SiLU.
    """

    def __init__(self, site: Site, channels: int, window: int, bias: bool, silu: bool) -> None:
        super().__init__(site)
        self.silu, self.dtype = silu, site.dtype
        self.shape = channels, window - 1
        shapes = {"weight": (channels, 1, window), "bias": (channels,)}
        for name in ("weight", "bias") if bias else ("weight",):
            empty = torch.empty(shapes[name], dtype=site.dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        sizes = {"num_channels": channels, "window": window}
        self.bound = site.bind_kernel(causal_convolution, **sizes, silu=silu)
        self.operands: tuple[Tensor, Tensor | None] = torch.empty(0), None

    def finalize(self) -> None:
        """Prepare weight and bias for the kernel, which has the weight as ``[C, W]``."""
        weight, bias = self.get_parameter("weight").data, self._parameters.get("bias")
        prepared = self.bound.prepared(
            weight=weight.squeeze(1).contiguous(), bias=None if bias is None else bias.data
        )
        self.operands = prepared["weight"], prepared["bias"]

    @property
    def state(self) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of a sequence's last inputs."""
        return self.shape, self.dtype

    def forward(self, x: Tensor, windows: Tensor, plan: StateBatch) -> Tensor:
        """Return ``[T, C]`` of ``x`` ``[T, C]``, and keep the last inputs in ``windows``."""
        places = plan.query_starts, plan.slots, plan.num_cached
        return self.bound.function(x, *self.operands, windows, *places, self.silu)


class GatedNorm(PluggableLayer):
    """Normalise groups of a row, with a gate before or after; see the op ``gated_rms_norm``."""

    def __init__(
        self, site: Site, hidden_size: int, group_size: int, eps: float, norm_first: bool
    ) -> None:
        super().__init__(site)
        self.eps, self.group_size, self.norm_first = eps, group_size, norm_first
        empty = torch.empty(hidden_size, dtype=site.dtype)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.bound = site.bind_kernel(
            gated_rms_norm,
            hidden_size=hidden_size,
            group_size=group_size,
            norm_before_gate=norm_first,
        )
        # In a tuple, so that it is no parameter of its own.
        self.operands: tuple[Tensor] = (self.weight,)

    def finalize(self) -> None:
        """Prepare the weight for the kernel."""
        self.operands = (self.bound.prepared(weight=self.weight)["weight"],)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``[..., H]`` of ``x`` and ``gate``, both ``[..., H]``."""
        (weight,) = self.operands
        return self.bound.function(x, gate, weight, self.eps, self.group_size, self.norm_first)
