"""Norms without a weight: bound for each size that their inputs can have.

Neither size nor dtype of their inputs is held by the module itself. The modules beside it hold
both: what a norm is called on comes of a projection or a table, whole or cut into heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import MAGNITUDES, judge_calls, normals
from interposer_models._adapt.forwards import Forward, own_forward
from interposer_models._adapt.norm_candidates import Norm
from interposer_ops.norms import layer_norm

_ROWS = (2, 3)
_SMALLEST, _LARGEST = 8, 1 << 16
_MOST_SIZES = 8

Call = tuple[Callable[..., Tensor], tuple[Any, ...]]


def bind_bare_norm(
    adaptation: Adaptation, module: nn.Module, name: str, norm: Norm
) -> str | Verdict:
    """Bind a norm that has no weight, for the sizes that the modules beside it have."""
    fit = adaptation.judge(module)
    if not fit:
        return fit
    parent = adaptation.model.get_submodule(name.rpartition(".")[0])
    held = next((each for each in parent.parameters() if each.is_floating_point()), None)
    sizes = list(dict.fromkeys(_sizes(parent)))[:_MOST_SIZES]
    if held is None or not sizes:
        return Verdict.refuse("it has no weight, and nothing beside it says size and dtype")
    fit = adaptation.judge_place(held.dtype, held.device)
    if not fit:
        return fit
    original, eps = own_forward(module), float(getattr(module, norm.eps))
    calls: dict[int, Call] = {}
    chosen: dict[str, None] = {}
    for size in sizes:
        bound = adaptation.site(name, held.dtype).bind_kernel(norm.op, **norm.dims(size))
        constants: dict[str, Tensor | None] = {"weight": None, "bias": None}
        if norm.op is not layer_norm:
            constants = {"weight": torch.ones(size, dtype=held.dtype, device=held.device)}
        prepared = bound.prepared(**constants)
        calls[size] = bound.function, (*(prepared[key] for key in constants), eps)
        chosen[kernel_name(bound.choice)] = None
    forward = _by_size(calls, original, held.dtype, adaptation.device)
    for size in sizes:
        for scale in MAGNITUDES:
            x = normals((*_ROWS, size), torch.float32, held.device).mul(scale).to(held.dtype)
            verdict = judge_calls(norm.op.tolerance, original, forward, x, size, 2 * size**0.5)
            if not verdict:
                return verdict
    adaptation.bind_forward(module, name, forward)
    return ", ".join(chosen)


def _sizes(parent: nn.Module) -> Iterator[int]:
    """Yield the sizes that rows within ``parent`` may have: those it names, and of its weights."""
    for held in vars(parent).values():
        if type(held) is int and _SMALLEST <= held <= _LARGEST:
            yield held
    for child in parent.modules():
        for parameter in child._parameters.values():
            if parameter is not None and 1 <= parameter.ndim <= 2:
                size = parameter.shape[-1]
                if _SMALLEST <= size <= _LARGEST:
                    yield size


def _by_size(
    calls: dict[int, Call], original: Forward, dtype: torch.dtype, device: torch.device
) -> Forward:
    """Return a forward that takes the kernel of a row's size, and the original for all else."""

    def forward(*args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named:
            (x,) = args
            call = calls.get(x.shape[-1])
            if call and x.dtype is dtype and x.device == device and not x.requires_grad:
                kernel, operands = call
                return kernel(x, *operands)
        return original(*args, **named)

    return forward
