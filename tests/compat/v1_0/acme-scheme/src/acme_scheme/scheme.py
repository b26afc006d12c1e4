"""Weights as int8 multiples of one step per layer. I and O are input and output features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, QuantizationScheme, Site
from interposer.errors import ConfigError
from interposer_ops.linear import linear


class StepsLinear(LinearMethod):
    """``weight`` is ``[O, I]`` int8; the weights are ``step`` times that."""

    def __init__(self, step: float) -> None:
        self.step = step

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight``; there is no bias."""
        if bias:
            raise ConfigError(f"{site.prefix} has a bias, which acme does not store")
        self.dtype = site.dtype
        self.bound = site.bind_kernel(linear, in_features=in_features, out_features=out_features)
        weight = torch.empty(out_features, in_features, dtype=torch.int8)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the kernel of ``linear`` with the weights that the steps stand for."""
        weight = layer.get_parameter("weight").to(self.dtype) * self.step
        prepared = self.bound.prepared(weight=weight, bias=None)
        layer.register_parameter("weight", None)
        return self.bound.function, (prepared["weight"], prepared["bias"])


class Steps(QuantizationScheme):
    """All linear layers but those whose name is in ``plain``."""

    method = "acme"

    def __init__(self, step: float, plain: frozenset[str]) -> None:
        self.step = step
        self.plain = plain

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Steps:
        """Return the scheme; every setting is known."""
        unknown = sorted(set(settings) - {"quant_method", "step", "plain"})
        if unknown or not isinstance(settings.get("step"), float):
            raise ConfigError(f"acme cannot use the settings {dict(settings)!r}")
        return cls(settings["step"], frozenset(settings.get("plain", ())))

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method, or None where a part is to stay plain."""
        return None if self.plain.intersection(parts) else StepsLinear(self.step)
