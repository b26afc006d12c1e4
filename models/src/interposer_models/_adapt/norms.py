"""Binding of norms: nn.LayerNorm, and leaf modules that compute a norm.

H is the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import MAGNITUDES, check_calls, random_normals
from interposer_models._adapt.forwards import class_forward, forward_one_input
from interposer_models._adapt.norm_candidates import Norm
from interposer_models._adapt.unweighted_norms import bind_unweighted_norm
from interposer_ops.norms import layer_norm

_ROWS = (2, 3)


def find_layer_norm(module: nn.LayerNorm) -> Norm | Verdict:
    """Return the norm that an nn.LayerNorm computes, or a refusal."""
    if len(module.normalized_shape) != 1:
        shape = tuple(module.normalized_shape)
        return Verdict.refuse(f"it normalises over {len(shape)} dimensions {shape}, kernels over 1")
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    weight, bias = (name if name in names else "" for name in ("weight", "bias"))
    return Norm(layer_norm, weight, bias, "eps")


def bind_norm(adaptation: Adaptation, module: nn.Module, name: str, norm: Norm) -> str | Verdict:
    """Bind a leaf to a kernel of the matching norm op."""
    verdict = adaptation.check_module(module)
    if not verdict:
        return verdict
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not parameters:
        return bind_unweighted_norm(adaptation, module, name, norm)
    dtype, size = parameters[0].dtype, parameters[0].shape[0]
    bound_kernel = adaptation.site(name, dtype).bind_kernel(norm.op, **norm.dims(size))
    constants = {
        key: None if tensor is None else tensor.detach()
        for key, tensor in norm.constants(module, size).items()
    }
    prepared = bound_kernel.prepared(**constants)
    eps = float(getattr(module, norm.eps))
    # The order of a norm op's constants is the order of its arguments.
    operands: tuple[Any, ...] = (*(prepared[key] for key in constants), eps)
    original = class_forward(module)
    kernel = bound_kernel.function
    with torch.no_grad():
        # Kernels return the layout of their input. Code after the module may call view, so if the
        # class always returns a contiguous tensor, the kernel must do so, too.
        columns = torch.ones(2, size, 3, dtype=dtype, device=parameters[0].device).transpose(1, 2)
        if original(columns).is_contiguous():
            kernel = _contiguous_kernel(kernel)
    forward = forward_one_input(kernel, operands, original, dtype, adaptation.device)
    largest_constants = sum(
        float(t.abs().max()) for t in constants.values() if t is not None and t.numel()
    )
    for scale in MAGNITUDES:
        x: Tensor = (
            random_normals((*_ROWS, size), torch.float32, parameters[0].device).mul(scale).to(dtype)
        )
        # After normalization, a row has the norm sqrt(size), which bounds each partial sum.
        magnitude = (1 + largest_constants) * size**0.5
        verdict = check_calls(norm.op.tolerance, original, forward, x, size, magnitude)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward)
    return kernel_name(bound_kernel.choice)


def _contiguous_kernel(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel whose result is contiguous for any input."""

    def call(x: Tensor, *operands: Any) -> Tensor:
        return kernel(x.contiguous(), *operands)

    return call
