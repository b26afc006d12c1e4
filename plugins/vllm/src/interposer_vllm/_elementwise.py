"""Norms and activations of vLLM on CPUs that call selected kernels in eager mode.

vLLM's own versions are sequences of torch ops; with one token, the overhead of each op exceeds the
arithmetic. Norms and activations have no prefix, so all layers of one class and width share one
request. The weights stay in vLLM's parameters.

Shapes: H hidden size, I intermediate size.
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
from interposer_vllm._methods import keep_in_vllm
from interposer_vllm._session import Session, session

__all__ = ["Activation", "Norm"]


class Norms(NamedTuple):
    """Kernels for the RMS norms of one width, which take the weight as vLLM stores it."""

    normalise: Callable[[Tensor, Tensor, float], Tensor]
    add_and_normalise: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class Norm:
    """Mixin of an ``RMSNorm`` that calls selected kernels, or vLLM's code if none was chosen."""

    norms: Norms | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        # With compilation or on another device, vLLM has set another method here.
        if layer._forward_method == self.forward_cpu:
            self.norms = _norms(layer)

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Normalise ``x`` ``[..., H]``; with a residual, return the normalised sum and the sum."""
        layer: Any = self
        weight, norms = layer.weight, self.norms
        # The kernels were bound for the dtype of the weight.
        if norms is None or x.dtype is not weight.dtype or is_compiling():
            return super().forward_cpu(x, residual)  # type: ignore[misc]
        if residual is None:
            return norms.normalise(x, weight, layer.variance_epsilon)
        if residual.dtype is not x.dtype:
            return super().forward_cpu(x, residual)  # type: ignore[misc]
        return norms.add_and_normalise(x, residual, weight, layer.variance_epsilon)


class Activation:
    """Mixin of a ``SiluAndMul`` that binds a kernel for each new width or dtype of inputs."""

    _bound_for: tuple[int, torch.dtype] | None = None
    _gate: Callable[[Tensor], Tensor]

    def forward_cpu(self, x: Tensor) -> Tensor:
        """Multiply SiLU of the first half of ``x`` ``[..., 2 I]`` by the second half."""
        if is_compiling():
            return super().forward_cpu(x)  # type: ignore[misc, no-any-return]
        width_and_dtype = x.shape[-1], x.dtype
        if width_and_dtype != self._bound_for:
            self._bound_for = width_and_dtype
            self._gate = _gate(*width_and_dtype) or super().forward_cpu  # type: ignore[misc]
        return self._gate(x)


def _norms(layer: Any) -> Norms | None:
    width, dtype = layer.hidden_size, layer.weight.dtype
    layer_name = f"RMSNorm of {width}"
    try:
        if not layer.has_weight or layer.variance_size_override is not None:
            raise ConfigError("it has no weight, or is scaled by a part of its elements")
        return _bound_norms(session(), layer_name, width, dtype)
    except InterposerError as error:
        keep_in_vllm(layer_name, error)
        return None


def _gate(width: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    layer_name = f"SiluAndMul of {width // 2}"
    try:
        return _bound_gate(session(), layer_name, width // 2, dtype)
    except InterposerError as error:
        keep_in_vllm(layer_name, error)
        return None


@cache
def _bound_norms(worker_session: Session, layer_name: str, width: int, dtype: torch.dtype) -> Norms:
    """Bind the kernels for all norms of one width.

    Raises: ConfigError: a kernel needs prepared weights. vLLM does not report loading other
        weights into a norm, so prepared weights would become stale.
    """
    site, name = worker_session.site(layer_name, dtype), str(dtype).removeprefix("torch.")
    norm = site.bind_kernel(rms_norm, hidden_size=width)
    add_norm = site.bind_kernel(fused_add_rms_norm, hidden_size=width, residual_dtype=name)
    # A kernel that returns this weight unchanged reads weights as vLLM stores them.
    weight = torch.ones(width, dtype=dtype, device="cpu")
    for kernel in (norm, add_norm):
        if kernel.prepared(weight=weight)["weight"] is not weight:
            raise ConfigError(
                f"{kernel.choice.chosen.name} prepares weights, but vLLM may replace them"
            )
    worker_session.taken.append(layer_name)
    return Norms(norm.function, add_norm.function)


@cache
def _bound_gate(
    worker_session: Session, layer_name: str, width: int, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    kernel = worker_session.site(layer_name, dtype).bind(silu_and_mul, intermediate_size=width)
    worker_session.taken.append(layer_name)
    return kernel
