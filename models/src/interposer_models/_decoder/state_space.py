"""The Mamba-2 mixer: a state space model with token-dependent decay and input.

Dimensions: T tokens, H hidden size, N heads, P head size, G groups, S state size, R rows of the
state cache, I = N P.

Source: arXiv:2405.21060.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from interposer import PluggableLayer, Site
from interposer_models._decoder.recurrent import Convolution, GatedNorm, RecurrentMixer
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.states import StateBatch, StateLayout
from interposer_ops.recurrence import state_space_scan


@dataclass(frozen=True)
class StateSpaceSizes:
    """Sizes and variants of a Mamba-2 mixer.

    Attributes:
        window: tokens that the convolution reads.
        steps: the smallest and the largest step.
        normed: outputs are normalised.
        norm_first: the norm comes before the multiplication by the gate, not after.
        out_bias: the output projection has a bias; None means the same as ``bias``.
        factors: of gate, input, B, C and steps; empty if all are 1.
    """

    hidden: int
    heads: int
    head: int
    groups: int
    state: int
    window: int
    bias: bool
    convolution_bias: bool
    steps: tuple[float, float] = (0.0, float("inf"))
    normed: bool = True
    norm_first: bool = False
    out_bias: bool | None = None
    factors: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Elements of all heads, I."""
        return self.heads * self.head

    @property
    def channels(self) -> int:
        """Channels of the convolution: the input of the scan, and the projections B and C."""
        return self.inner + 2 * self.groups * self.state


class Scan(PluggableLayer):
    """The op ``state_space_scan`` with per-head parameters."""

    def __init__(self, site: Site, sizes: StateSpaceSizes) -> None:
        super().__init__(site)
        self.sizes = sizes
        for name in ("A_log", "D", "dt_bias"):
            # Decay parameters are exponentiated; float32 keeps small decay rates apart.
            empty = torch.empty(sizes.heads, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bound = site.bind_kernel(
            state_space_scan,
            num_heads=sizes.heads,
            head_size=sizes.head,
            num_groups=sizes.groups,
            state_size=sizes.state,
        )
        self.constants: tuple[Tensor, ...] = ()

    def finalize(self) -> None:
        """Compute each head's decay rate, -exp(A_log), for the kernel."""
        decay, skip, bias = (self.get_parameter(n).data for n in ("A_log", "D", "dt_bias"))
        prepared = self.bound.prepared(decay=-decay.exp(), skip=skip)
        self.constants = prepared["decay"], prepared["skip"], bias

    def forward(self, x: Tensor, steps: Tensor, states: Tensor, plan: StateBatch) -> Tensor:
        """Run the scan and update the states: ``[T, I]``.

        Args:
            x: ``[T, I + 2 G S]``, the convolution's output.
            steps: ``[T, N]``, before softplus.
            states: ``[R, N, P, S]`` float32.
        """
        sizes = self.sizes
        decay, skip, bias = self.constants
        steps = functional.softplus(steps.float() + bias).clamp(*sizes.steps)
        width = sizes.groups * sizes.state
        x, b, c = x.split((sizes.inner, width, width), dim=-1)
        heads = x.unflatten(-1, (sizes.heads, sizes.head))
        b, c = (part.unflatten(-1, (sizes.groups, sizes.state)) for part in (b, c))
        cache_arguments = plan.query_starts, plan.slots, plan.num_cached
        return self.bound.function(
            heads, steps, decay, b, c, skip, states, *cache_arguments
        ).flatten(1)


class StateSpaceMixer(RecurrentMixer):
    """Projections, convolution, scan and gated norm, in the position of attention."""

    def __init__(self, site: Site, sizes: StateSpaceSizes, eps: float) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.inner + sizes.channels + sizes.heads
        self.in_proj = Linear(site.at("in_proj"), sizes.hidden, width, sizes.bias)
        self.conv1d = Convolution(
            site.at("conv1d"), sizes.channels, sizes.window, sizes.convolution_bias, silu=True
        )
        self.scan = Scan(site, sizes)
        if sizes.normed:
            group = sizes.inner // sizes.groups
            self.norm = GatedNorm(site.at("norm"), sizes.inner, group, eps, sizes.norm_first)
        out_bias = sizes.bias if sizes.out_bias is None else sizes.out_bias
        self.out_proj = Linear(site.at("out_proj"), sizes.inner, sizes.hidden, out_bias)

    def state_layout(self) -> StateLayout:
        """Return a sequence's state: the convolution's last inputs, and each head's state."""
        sizes = self.sizes
        return StateLayout(
            (self.conv1d.state, ((sizes.heads, sizes.head, sizes.state), torch.float32))
        )

    def mixed(
        self, x: Tensor, cache: tuple[Tensor, ...], plan: StateBatch
    ) -> tuple[Tensor, Tensor]:
        """Run projection, convolution and scan; return the output and the gate, both ``[T, I]``."""
        windows, states = cache
        gate, x, steps = self._projected(x)
        return self.scan(self.conv1d(x, windows, plan), steps, states, plan), gate

    def ended(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate, the norm if there is one, and the output projection: ``[T, H]``."""
        y = self.norm(y, gate) if self.sizes.normed else y * functional.silu(gate)
        return self.out_proj(y)  # type: ignore[no-any-return]

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the gate ``[T, I]``, the convolution's input and the raw steps ``[T, N]``."""
        sizes = self.sizes
        projected = self.in_proj(x)
        # Falcon-H1 scales each part; all other families split without copying.
        if not sizes.factors:
            return projected.split((sizes.inner, sizes.channels, sizes.heads), dim=-1)  # type: ignore[no-any-return]
        width = sizes.groups * sizes.state
        widths = (sizes.inner, sizes.inner, width, width, sizes.heads)
        gate, *mixed, steps = (
            part * factor
            for part, factor in zip(projected.split(widths, dim=-1), sizes.factors, strict=True)
        )
        return gate, torch.cat(mixed, dim=-1), steps
