"""Norms and activations of vLLM on CPUs that call a chosen kernel where nothing is compiled.

vLLM's own are torch's ops one by one, of which each costs more than the numbers of a token.
Such layers have no name: they share the place of their class and width. Weights stay vLLM's.

Dimensions: H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from interposer.errors import ConfigError, InterposerError
from interposer_ops.activations import silu_and_mul
from interposer_ops.norms import fused_add_rms_norm, rms_norm
from interposer_vllm._methods import keep
from interposer_vllm._session import Session, session

__all__ = ["Activation", "Norm"]


class Norms(NamedTuple):
    """The kernels of norms of one width, each called with the weight as vLLM holds it."""

    normalise: Callable[[Tensor, Tensor, float], Tensor]
    add_and_normalise: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class Norm:
    """Part of an ``RMSNorm`` that calls chosen kernels, and vLLM's own where there are none."""

    norms: Norms | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        # Where vLLM compiles, or has another device, it has chosen another method.
        if layer._forward_method == self.forward_cpu:
            self.norms = _norms(layer)

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of ``x`` ``[..., H]``; with a residual that of the sum, and the sum."""
        layer: Any = self
        weight, norms = layer.weight, self.norms
        if norms is None or x.dtype is not weight.dtype or is_compiling():
            return super().forward_cpu(x, residual)  # type: ignore[misc]
        if residual is None:
            return norms.normalise(x, weight, layer.variance_epsilon)
        if residual.dtype is not x.dtype:
            return super().forward_cpu(x, residual)  # type: ignore[misc]
        return norms.add_and_normalise(x, residual, weight, layer.variance_epsilon)


class Activation:
    """Part of a ``SiluAndMul``, which learns its width from what it is called with."""

    _known: tuple[int, torch.dtype] | None = None
    _gate: Callable[[Tensor], Tensor]

    def forward_cpu(self, x: Tensor) -> Tensor:
        """Return ``[..., I]`` of ``x`` ``[..., 2 I]``."""
        if is_compiling():
            return super().forward_cpu(x)  # type: ignore[misc, no-any-return]
        known = x.shape[-1], x.dtype
        if known != self._known:
            self._known = known
            self._gate = _gate(*known) or super().forward_cpu  # type: ignore[misc]
        return self._gate(x)


def _norms(layer: Any) -> Norms | None:
    width, dtype = layer.hidden_size, layer.weight.dtype
    place = f"RMSNorm of {width}"
    try:
        if not layer.has_weight or layer.variance_size_override is not None:
            raise ConfigError("it has no weight, or is scaled by a part of its elements")
        return _bound_norms(session(), place, width, dtype)
    except InterposerError as error:
        keep(place, error)
        return None


def _gate(width: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    place = f"SiluAndMul of {width // 2}"
    try:
        return _bound_gate(session(), place, width // 2, dtype)
    except InterposerError as error:
        keep(place, error)
        return None


@cache
def _bound_norms(found: Session, place: str, width: int, dtype: torch.dtype) -> Norms:
    """Choose once for all norms of a width.

    Raises: ConfigError: a kernel wants weights in a form of its own. vLLM does not say when it
        loads others into a norm.
    """
    site, name = found.site(place, dtype), str(dtype).removeprefix("torch.")
    alone = site.bind_kernel(rms_norm, hidden_size=width)
    added = site.bind_kernel(fused_add_rms_norm, hidden_size=width, residual_dtype=name)
    weight = torch.ones(width, dtype=dtype, device="cpu")
    for bound in (alone, added):
        if bound.prepared(weight=weight)["weight"] is not weight:
            raise ConfigError(f"{bound.choice.chosen.name} prepares weights, which vLLM exchanges")
    found.taken.append(place)
    return Norms(alone.function, added.function)


@cache
def _bound_gate(
    found: Session, place: str, width: int, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    kernel = found.site(place, dtype).bind(silu_and_mul, intermediate_size=width)
    found.taken.append(place)
    return kernel
