"""The Gated DeltaNet mixer: linear attention with a key-value state that each token corrects.

Dimensions: T tokens, H hidden size, G key heads of size K, N value heads of size D,
R rows of the state cache, C = 2 G K + N D channels.

Source: arXiv:2412.06464.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from interposer import PluggableLayer, Site
from interposer_models._decoder.recurrent import Convolution, GatedNorm, RecurrentMixer
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.states import StateBatch, StateLayout
from interposer_ops.norms import l2_norm
from interposer_ops.recurrence import gated_delta_rule

# Epsilon of the L2 norm of keys and queries; the reference fixes it, independent of the config.
_EPS = 1e-6


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of a Gated DeltaNet mixer.

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
        """Elements of all keys, G K."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        """Elements of all values, N D."""
        return self.value_heads * self.value


Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys and values ``[T, C]``; gates ``[T, N D]``; raw beta and decay ``[T, N]``."""
Projections = Callable[[Site, DeltaSizes], nn.Module]
"""Builds the module at a mixer's site that projects ``[T, H]`` to ``Projected``."""


class SeparateProjections(nn.Module):
    """Separate projections of the convolved channels, gates, beta and decay, as in Qwen3.5."""

    def __init__(self, site: Site, sizes: DeltaSizes) -> None:
        super().__init__()
        # Two merged projections rather than one: a scheme may quantize only the wide outputs.
        self.wide = {"in_proj_qkv": 2 * sizes.keys + sizes.values, "in_proj_z": sizes.values}
        self.narrow = dict.fromkeys(("in_proj_b", "in_proj_a"), sizes.value_heads)
        self.in_proj = MergedLinear(site.at("in_proj"), sizes.hidden, self.wide)
        self.in_proj_ba = MergedLinear(site.at("in_proj_ba"), sizes.hidden, self.narrow)

    def forward(self, x: Tensor) -> Projected:
        """Project ``x`` ``[T, H]``."""
        mixed, gate = self.in_proj(x).split((*self.wide.values(),), dim=-1)
        beta, decay = self.in_proj_ba(x).chunk(2, dim=-1)
        return mixed, gate, beta, decay


class GroupedProjections(nn.Module):
    """Two projections with outputs interleaved by key head, as in Qwen3-Next."""

    def __init__(self, site: Site, sizes: DeltaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = 2 * (sizes.keys + sizes.values)
        self.in_proj_qkvz = Linear(site.at("in_proj_qkvz"), sizes.hidden, width)
        self.in_proj_ba = Linear(site.at("in_proj_ba"), sizes.hidden, 2 * sizes.value_heads)

    def forward(self, x: Tensor) -> Projected:
        """Project ``x`` ``[T, H]``."""
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
    """The op ``gated_delta_rule`` on L2-normalised queries and keys."""

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
        """Compute each head's decay rate, -exp(A_log)."""
        self.constants = -self.get_parameter("A_log").data.exp(), self.get_parameter("dt_bias").data

    def forward(
        self, mixed: Tensor, beta: Tensor, decay: Tensor, states: Tensor, plan: StateBatch
    ) -> Tensor:
        """Update the states and compute the outputs ``[T, N, D]``.

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
    """Projections, convolution, delta rule and gated norm, in the position of attention."""

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
        """Return a sequence's state: the convolution's last inputs, and each head's memory."""
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
        """Apply the gated norm and the output projection: ``[T, H]``."""
        return self.out_proj(self.norm(y, gate).flatten(1))  # type: ignore[no-any-return]
