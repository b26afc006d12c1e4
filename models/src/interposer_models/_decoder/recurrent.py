"""Layers with a fixed-size state per sequence, and a convolution and a norm for such layers.

Dimensions: T tokens, C channels, W window of the convolution, H hidden size.
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
    """A layer with one state of fixed size per sequence as its cache, instead of pages."""

    @abstractmethod
    def state_layout(self) -> StateLayout:
        """Return the shapes and dtypes of one sequence's state."""


class RecurrentMixer(RecurrentLayer):
    """A recurrent layer in the position of attention, which ends with a gate and a projection."""

    @abstractmethod
    def mixed(
        self, x: Tensor, cache: tuple[Tensor, ...], plan: StateBatch
    ) -> tuple[Tensor, Tensor]:
        """Update the states with ``x`` ``[T, H]``; return the mixer's output and the gate."""

    @abstractmethod
    def ended(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate and the output projection to results of ``mixed``: ``[T, H]``."""

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cache: tuple[Tensor, ...],
        plan: StateBatch,
        rows: Tensor | None,
    ) -> Tensor:
        """Compute ``[T, H]`` from ``x`` ``[T, H]``, or ``[rows, H]``.

        Every token updates the state; the output is projected only for the tokens in ``rows``.
        """
        # All tokens must update the state, so rows are dropped only after the mixer.
        y, gate = self.mixed(x, cache, plan)
        return self.ended(y, gate) if rows is None else self.ended(y[rows], gate[rows])


class Convolution(PluggableLayer):
    """A causal depthwise convolution; see the op ``causal_convolution``.

    Args:
        silu: apply SiLU to the output.
    """

    def __init__(self, site: Site, channels: int, window: int, bias: bool, silu: bool) -> None:
        super().__init__(site)
        self.silu, self.dtype = silu, site.dtype
        # A sequence's state: the previous inputs that the next token's window still covers.
        self.shape = channels, window - 1
        shapes = {"weight": (channels, 1, window), "bias": (channels,)}
        for name in ("weight", "bias") if bias else ("weight",):
            empty = torch.empty(shapes[name], dtype=site.dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        sizes = {"num_channels": channels, "window": window}
        self.bound = site.bind_kernel(causal_convolution, **sizes, silu=silu)
        self.operands: tuple[Tensor, Tensor | None] = torch.empty(0), None

    def finalize(self) -> None:
        """Prepare the weight, reshaped to ``[C, W]``, and the bias for the kernel."""
        weight, bias = self.get_parameter("weight").data, self._parameters.get("bias")
        prepared = self.bound.prepared(
            weight=weight.squeeze(1).contiguous(), bias=None if bias is None else bias.data
        )
        self.operands = prepared["weight"], prepared["bias"]

    @property
    def state(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a sequence's last inputs."""
        return self.shape, self.dtype

    def forward(self, x: Tensor, windows: Tensor, plan: StateBatch) -> Tensor:
        """Convolve ``x`` ``[T, C]``, and store each sequence's last inputs in ``windows``."""
        cache_arguments = plan.query_starts, plan.slots, plan.num_cached
        return self.bound.function(x, *self.operands, windows, *cache_arguments, self.silu)


class GatedNorm(PluggableLayer):
    """RMSNorm over groups of a row, gated before or after; see the op ``gated_rms_norm``."""

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
        # In a tuple, so that torch does not register it as a second parameter.
        self.operands: tuple[Tensor] = (self.weight,)

    def finalize(self) -> None:
        """Prepare the weight for the kernel."""
        self.operands = (self.bound.prepared(weight=self.weight)["weight"],)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise ``x`` and multiply by the gate's SiLU; all ``[..., H]``."""
        (weight,) = self.operands
        return self.bound.function(x, gate, weight, self.eps, self.group_size, self.norm_first)
