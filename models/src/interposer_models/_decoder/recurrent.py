"""Recurrent layers of decoders: Gated DeltaNet and Mamba-2 mixers with a fixed-size state.

A ``RecurrentLayer`` caches one state per sequence instead of pages of keys and values. Both mixers
share a causal convolution and a gated norm.

Dimensions: T tokens, H hidden size, C channels of the convolution, W window of the convolution, R
rows of the state cache. Gated DeltaNet: G key heads of size K, N value heads of size D, C = 2 G K +
N D. Mamba-2: N heads of size P, G groups, S state size, I = N P, C = I + 2 G S.

Source: arXiv:2412.06464 (Gated DeltaNet), arXiv:2405.21060 (Mamba-2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from interposer import PluggableLayer, Site
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.states import StateBatch, StateLayout
from interposer_ops.norms import gated_rms_norm, l2_norm
from interposer_ops.recurrence import causal_convolution, gated_delta_rule, state_space_scan


class RecurrentLayer(nn.Module, ABC):
    """Base of layers whose cache is one fixed-size state per sequence, instead of pages."""

    @abstractmethod
    def state_layout(self) -> StateLayout:
        """Return the shapes and dtypes of a sequence's state."""


class RecurrentMixer(RecurrentLayer):
    """Base of recurrent layers in the position of attention, with output gate and projection."""

    @abstractmethod
    def mixed(
        self, x: Tensor, cache: tuple[Tensor, ...], plan: StateBatch
    ) -> tuple[Tensor, Tensor]:
        """Update the states with ``x`` ``[T, H]``; return the ungated output and the gate."""

    @abstractmethod
    def ended(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate and the output projection to the results of ``mixed``: ``[T, H]``."""

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cache: tuple[Tensor, ...],
        plan: StateBatch,
        rows: Tensor | None,
    ) -> Tensor:
        """Compute the layer's output: ``[T, H]`` from ``x`` ``[T, H]``, or ``[rows, H]``.

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
        """Prepare the weight as ``[C, W]``, and the bias, for the kernel."""
        weight, bias = self.get_parameter("weight").data, self._parameters.get("bias")
        prepared = self.bound.prepared(
            weight=weight.squeeze(1).contiguous(), bias=None if bias is None else bias.data
        )
        self.operands = prepared["weight"], prepared["bias"]

    @property
    def state(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the state: a sequence's last inputs."""
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
        """Prepare the norm's weight for the kernel."""
        self.operands = (self.bound.prepared(weight=self.weight)["weight"],)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise ``x`` and multiply by the gate's SiLU; all ``[..., H]``."""
        (weight,) = self.operands
        return self.bound.function(x, gate, weight, self.eps, self.group_size, self.norm_first)


# Epsilon of the L2 norm of keys and queries; the reference fixes it, independent of the config.
_EPS = 1e-6


@dataclass(frozen=True)
class DeltaSizes:
    """Head counts and sizes of a Gated DeltaNet mixer.

    Attributes:
        key_heads, key: number and size of query and key heads.
        value_heads, value: number and size of value heads.
        window: tokens that the convolution reads.
    """

    hidden: int
    key_heads: int
    key: int
    value_heads: int
    value: int
    window: int

    @property
    def keys(self) -> int:
        """Number of key elements per token over all key heads, G K."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        """Number of value elements per token over all value heads, N D."""
        return self.value_heads * self.value


Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys and values ``[T, C]``; gates ``[T, N D]``; raw beta and decay ``[T, N]``."""
Projections = Callable[[Site, DeltaSizes], nn.Module]
"""Builds the module at a mixer's site that projects ``[T, H]`` to ``Projected``."""


class SeparateProjections(nn.Module):
    """Separate input projections of the convolved channels, gates, beta and decay (Qwen3.5)."""

    def __init__(self, site: Site, sizes: DeltaSizes) -> None:
        super().__init__()
        # Two merged projections rather than one: a scheme may quantize only the wide outputs.
        self.wide = {"in_proj_qkv": 2 * sizes.keys + sizes.values, "in_proj_z": sizes.values}
        self.narrow = dict.fromkeys(("in_proj_b", "in_proj_a"), sizes.value_heads)
        self.in_proj = MergedLinear(site.at("in_proj"), sizes.hidden, self.wide)
        self.in_proj_ba = MergedLinear(site.at("in_proj_ba"), sizes.hidden, self.narrow)

    def forward(self, x: Tensor) -> Projected:
        """Project ``x`` ``[T, H]`` to queries, keys, values, gates, beta and decay."""
        mixed, gate = self.in_proj(x).split((*self.wide.values(),), dim=-1)
        beta, decay = self.in_proj_ba(x).chunk(2, dim=-1)
        return mixed, gate, beta, decay


class GroupedProjections(nn.Module):
    """Two input projections whose outputs are interleaved by key head (Qwen3-Next)."""

    def __init__(self, site: Site, sizes: DeltaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = 2 * (sizes.keys + sizes.values)
        self.in_proj_qkvz = Linear(site.at("in_proj_qkvz"), sizes.hidden, width)
        self.in_proj_ba = Linear(site.at("in_proj_ba"), sizes.hidden, 2 * sizes.value_heads)

    def forward(self, x: Tensor) -> Projected:
        """Project ``x`` ``[T, H]`` to queries, keys, values, gates, beta and decay."""
        sizes = self.sizes
        values_per_key_head = sizes.values // sizes.key_heads
        projected = self.in_proj_qkvz(x).unflatten(-1, (sizes.key_heads, -1))
        query, key, value, gate = projected.split(
            (sizes.key, sizes.key, values_per_key_head, values_per_key_head), dim=-1
        )
        beta, decay = self.in_proj_ba(x).unflatten(-1, (sizes.key_heads, -1)).chunk(2, dim=-1)
        # The convolution wants all queries, then all keys, then all values.
        mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
        return mixed, gate.flatten(1), beta.flatten(1), decay.flatten(1)


class DeltaRule(PluggableLayer):
    """The op ``gated_delta_rule``, applied to L2-normalised queries and keys."""

    def __init__(self, site: Site, sizes: DeltaSizes) -> None:
        super().__init__(site)
        self.sizes = sizes
        for name in ("A_log", "dt_bias"):
            # Decay parameters are exponentiated; float32 keeps small decay rates apart.
            empty = torch.empty(sizes.value_heads, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.unit = site.bind(l2_norm, head_size=sizes.key)
        self.rule = site.bind(
            gated_delta_rule,
            num_heads=sizes.key_heads,
            num_value_heads=sizes.value_heads,
            key_size=sizes.key,
            value_size=sizes.value,
        )
        self.constants: tuple[Tensor, ...] = ()

    def finalize(self) -> None:
        """Compute each head's decay rate, -exp(A_log), for the kernel."""
        self.constants = -self.get_parameter("A_log").data.exp(), self.get_parameter("dt_bias").data

    def forward(
        self, mixed: Tensor, beta: Tensor, decay: Tensor, states: Tensor, plan: StateBatch
    ) -> Tensor:
        """Update the recurrent states, and compute the outputs ``[T, N, D]``.

        Args:
            mixed: ``[T, C]``, the convolution's output.
            beta, decay: ``[T, N]``, before the activations.
            states: ``[R, N, K, D]`` float32.
        """
        sizes = self.sizes
        rate, bias = self.constants
        query, key, value = mixed.split((sizes.keys, sizes.keys, sizes.values), dim=-1)
        query, key = (
            self.unit(part.unflatten(-1, (sizes.key_heads, sizes.key)), _EPS)
            for part in (query, key)
        )
        value = value.unflatten(-1, (sizes.value_heads, sizes.value))
        # In float32: rounding errors of the decay would accumulate over the sequence.
        decay = rate * functional.softplus(decay.float() + bias)
        cache_arguments = plan.query_starts, plan.slots, plan.num_cached
        factors = decay, beta.float().sigmoid()
        return self.rule(query, key, value, *factors, states, *cache_arguments, sizes.key**-0.5)


class DeltaMixer(RecurrentMixer):
    """Gated DeltaNet mixer: projections, convolution, delta rule and gated norm."""

    def __init__(self, site: Site, sizes: DeltaSizes, eps: float, projections: Projections) -> None:
        super().__init__()
        self.sizes = sizes
        self.projections = projections(site, sizes)
        channels = 2 * sizes.keys + sizes.values
        conv_site = site.at("conv1d")
        self.conv1d = Convolution(conv_site, channels, sizes.window, bias=False, silu=True)
        self.rule = DeltaRule(site, sizes)
        self.norm = GatedNorm(site.at("norm"), sizes.value, sizes.value, eps, norm_first=True)
        self.out_proj = Linear(site.at("out_proj"), sizes.values, sizes.hidden)

    def state_layout(self) -> StateLayout:
        """Return the layout of a sequence's state: last convolution inputs, and memory per head."""
        sizes = self.sizes
        # The state is float32 for the same reason as the decay.
        memory = (sizes.value_heads, sizes.key, sizes.value), torch.float32
        return StateLayout((self.conv1d.state, memory))

    def mixed(
        self, x: Tensor, cache: tuple[Tensor, ...], plan: StateBatch
    ) -> tuple[Tensor, Tensor]:
        """Run projections, convolution and delta rule; return ``[T, N, D]`` and the gate."""
        windows, states = cache
        mixed, gate, beta, decay = self.projections(x)
        y = self.rule(self.conv1d(mixed, windows, plan), beta, decay, states, plan)
        return y, gate.view(y.shape)

    def ended(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gated norm and the output projection; return ``[T, H]``."""
        return self.out_proj(self.norm(y, gate).flatten(1))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class StateSpaceSizes:
    """Sizes and optional parts of a Mamba-2 mixer.

    Attributes:
        window: tokens that the convolution reads.
        steps: the smallest and the largest step.
        normed: outputs are normalised.
        norm_first: the norm comes before the multiplication by the gate, not after.
        out_bias: the output projection has a bias; None means the same as ``bias``.
        factors: factors of gate, input, B, C and steps; empty if all are 1.
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
        """Number of elements of all heads together, I."""
        return self.heads * self.head

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: the scan's input, and the projections B and C."""
        return self.inner + 2 * self.groups * self.state


class Scan(PluggableLayer):
    """The op ``state_space_scan`` with its per-head parameters."""

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
        """Run the scan, and update the states; return ``[T, I]``.

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
    """Mamba-2 mixer: projections, convolution, scan and gated norm."""

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
        """Return the layout of a sequence's state: last convolution inputs, and state per head."""
        sizes = self.sizes
        return StateLayout(
            (self.conv1d.state, ((sizes.heads, sizes.head, sizes.state), torch.float32))
        )

    def mixed(
        self, x: Tensor, cache: tuple[Tensor, ...], plan: StateBatch
    ) -> tuple[Tensor, Tensor]:
        """Run projection, convolution and scan; return the output and the gate, both ``[T, I]``."""
        windows, states = cache
        gate, x, steps = self._project(x)
        return self.scan(self.conv1d(x, windows, plan), steps, states, plan), gate

    def ended(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate, the optional norm, and the output projection; return ``[T, H]``."""
        y = self.norm(y, gate) if self.sizes.normed else y * functional.silu(gate)
        return self.out_proj(y)  # type: ignore[no-any-return]

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project the input to the gate ``[T, I]``, the convolution's input and time steps."""
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
