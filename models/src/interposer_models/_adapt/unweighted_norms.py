"""Binding of norms without a weight, for each possible row size of the inputs.

Such a norm holds neither size nor dtype of the input. Both are taken from the parent's other
modules: the input comes from a projection or a table, as a whole or split into heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import MAGNITUDES, check_calls, random_normals
from interposer_models._adapt.forwards import Forward, class_forward
from interposer_models._adapt.norm_candidates import Norm
from interposer_ops.norms import layer_norm

_ROWS = (2, 3)
_MIN_SIZE, _MAX_SIZE = 8, 1 << 16
_MAX_SIZES = 8

Call = tuple[Callable[..., Tensor], tuple[Any, ...]]


def bind_unweighted_norm(
    adaptation: Adaptation, module: nn.Module, name: str, norm: Norm
) -> str | Verdict:
    """Bind a norm that has no weight, for the row sizes found in its parent module."""
    verdict = adaptation.check_module(module)
    if not verdict:
        return verdict
    parent = adaptation.model.get_submodule(name.rpartition(".")[0])
    sample = next(
        (parameter for parameter in parent.parameters() if parameter.is_floating_point()), None
    )
    # Too many candidates cost a kernel binding each; further sizes run the class's forward.
    sizes = list(dict.fromkeys(_sizes(parent)))[:_MAX_SIZES]
    if sample is None or not sizes:
        return Verdict.refuse("it has no weight, and no neighbouring module states size and dtype")
    verdict = adaptation.check_rows(sample.dtype, sample.device)
    if not verdict:
        return verdict
    original, eps = class_forward(module), float(getattr(module, norm.eps))
    calls: dict[int, Call] = {}
    kernels: dict[str, None] = {}
    for size in sizes:
        bound_kernel = adaptation.site(name, sample.dtype).bind_kernel(norm.op, **norm.dims(size))
        constants: dict[str, Tensor | None] = {"weight": None, "bias": None}
        if norm.op is not layer_norm:
            constants = {"weight": torch.ones(size, dtype=sample.dtype, device=sample.device)}
        prepared = bound_kernel.prepared(**constants)
        calls[size] = bound_kernel.function, (*(prepared[key] for key in constants), eps)
        kernels[kernel_name(bound_kernel.choice)] = None
    forward = _by_size(calls, original, sample.dtype, adaptation.device)
    for size in sizes:
        for scale in MAGNITUDES:
            x = (
                random_normals((*_ROWS, size), torch.float32, sample.device)
                .mul(scale)
                .to(sample.dtype)
            )
            verdict = check_calls(norm.op.tolerance, original, forward, x, size, 2 * size**0.5)
            if not verdict:
                return verdict
    adaptation.bind_forward(module, name, forward)
    return ", ".join(kernels)


def _sizes(parent: nn.Module) -> Iterator[int]:
    """Yield possible row sizes within ``parent``: integer attributes, and sizes of weights."""
    for value in vars(parent).values():
        if type(value) is int and _MIN_SIZE <= value <= _MAX_SIZE:
            yield value
    for child in parent.modules():
        for parameter in child._parameters.values():
            if parameter is not None and 1 <= parameter.ndim <= 2:
                size = parameter.shape[-1]
                if _MIN_SIZE <= size <= _MAX_SIZE:
                    yield size


def _by_size(
    calls: dict[int, Call], original: Forward, dtype: torch.dtype, device: torch.device
) -> Forward:
    """Return a forward that selects the kernel by row size, and calls ``original`` otherwise."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            call = calls.get(x.shape[-1])
            if call and x.dtype is dtype and x.device == device and not x.requires_grad:
                kernel, operands = call
                return kernel(x, *operands)
        return original(*args, **kwargs)

    return forward
