"""Norms of a foreign model: nn.LayerNorm, and leaves that compute what a norm does.

H is the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import MAGNITUDES, judge_calls, normals
from interposer_models._adapt.bare_norms import bind_bare_norm
from interposer_models._adapt.forwards import one_input, own_forward
from interposer_models._adapt.norm_candidates import Norm
from interposer_ops.norms import layer_norm

_ROWS = (2, 3)


def layer_norm_of(module: nn.LayerNorm) -> Norm | Verdict:
    """Return what an nn.LayerNorm computes, or why no op does."""
    if len(module.normalized_shape) != 1:
        shape = tuple(module.normalized_shape)
        return Verdict.refuse(f"it normalises over {len(shape)} dimensions {shape}, kernels over 1")
    names = {name for name, held in module._parameters.items() if held is not None}
    weight, bias = (name if name in names else "" for name in ("weight", "bias"))
    return Norm(layer_norm, weight, bias, "eps")


def bind_norm(adaptation: Adaptation, module: nn.Module, name: str, norm: Norm) -> str | Verdict:
    """Bind a leaf to the kernel of the op that it computes."""
    fit = adaptation.judge(module)
    if not fit:
        return fit
    held = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not held:
        return bind_bare_norm(adaptation, module, name, norm)
    dtype, size = held[0].dtype, held[0].shape[0]
    bound = adaptation.site(name, dtype).bind_kernel(norm.op, **norm.dims(size))
    constants = {
        key: None if tensor is None else tensor.detach()
        for key, tensor in norm.constants(module, size).items()
    }
    prepared = bound.prepared(**constants)
    eps = float(getattr(module, norm.eps))
    operands: tuple[Any, ...] = (*(prepared[key] for key in constants), eps)
    original = own_forward(module)
    kernel = bound.function
    with torch.no_grad():
        # Kernels return the layout of their input. What follows may view what the module returns.
        columns = torch.ones(2, size, 3, dtype=dtype, device=held[0].device).transpose(1, 2)
        if original(columns).is_contiguous():
            kernel = _dense(kernel)
    forward = one_input(kernel, operands, original, dtype, adaptation.device)
    largest = sum(float(t.abs().max()) for t in constants.values() if t is not None and t.numel())
    for scale in MAGNITUDES:
        x: Tensor = normals((*_ROWS, size), torch.float32, held[0].device).mul(scale).to(dtype)
        # A row of unit length times the weight: no partial sum is larger than the square root.
        magnitude = (1 + largest) * size**0.5
        verdict = judge_calls(norm.op.tolerance, original, forward, x, size, magnitude)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward)
    return kernel_name(bound.choice)


def _dense(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel whose result is dense, whatever its input."""

    def call(x: Tensor, *operands: Any) -> Tensor:
        return kernel(x.contiguous(), *operands)

    return call
