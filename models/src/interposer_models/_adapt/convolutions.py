"""Convolutions of a foreign model: those over patches are projections of patches.

Dimensions: B images, C channels, O output channels, P patches of an image.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import judge_calls, signs
from interposer_models._adapt.forwards import Forward, own_forward
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import (
    Call,
    give_up,
    largest_sum,
    restore_of,
)
from interposer_ops.linear import linear

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Elements of a patch from which a product of patches is as fast as torch's convolution, whatever
# the number of images: `benchmarks/adapt.py convolutions` measures it.
_FEWEST = {torch.bfloat16: 768, torch.float32: 1536}


def bind_convolution(adaptation: Adaptation, module: Any, name: str) -> str | Verdict:
    """Bind a convolution over patches that lie side by side and are large enough."""
    fit = adaptation.judge(module)
    if not fit:
        return fit
    fit = _judge_form(module, adaptation.device)
    if not fit:
        return fit
    weight, bias = module.weight, module.bias
    rows = weight.detach().flatten(1)
    # No scheme stores convolutions in codes, so that quantization leaves them plain.
    bound = adaptation.site(name, weight.dtype).bind_kernel(
        linear, in_features=rows.shape[1], out_features=rows.shape[0], biased=bias is not None
    )
    prepared = bound.prepared(weight=rows, bias=None if bias is None else bias.detach())
    call: Call = bound.function, (prepared["weight"], prepared["bias"])
    restore = restore_of(bound, call[1])
    if restore is None:
        return Verdict.refuse(
            "torch's is as fast: no kernel of 'linear' packs its weight, which would pay for "
            "copying the patches"
        )
    forward = _forward(module, call, adaptation.device)
    verdict = _judge(module, forward, rows)
    if not verdict:
        return verdict
    packed = PackedWeight(weight, partial(_by_rows, restore), f"{name}.weight")
    verdict = give_up(adaptation, [(module, "weight")], weight, packed)
    if not verdict:
        return verdict
    adaptation.bind_forward(module, name, forward)
    return kernel_name(bound.choice)


def _judge_form(module: Any, device: torch.device) -> Verdict:
    """Refuse what is no product of patches, and what torch computes faster."""
    if module.groups != 1 or any(size != 1 for size in module.dilation):
        return Verdict.refuse("torch's stays: it has groups or gaps, so that it is no product")
    if module.kernel_size != module.stride or any(module._reversed_padding_repeated_twice):
        return Verdict.refuse(
            "torch's is faster: its windows overlap or are padded, and copying them costs more "
            "than a kernel saves"
        )
    size, dtype = prod(module.weight.shape[1:]), module.weight.dtype
    if device.type != "cpu" or dtype not in _FEWEST:
        return Verdict.refuse(
            f"torch's stays: nobody measured whether patches as a product are faster for {dtype} "
            f"on {device.type}"
        )
    if size < _FEWEST[dtype]:
        return Verdict.refuse(
            f"torch's is faster: its patches have {size} elements, and copying them pays from "
            f"{_FEWEST[dtype]} on for {dtype}"
        )
    return Verdict.accept()


def _forward(module: Any, call: Call, device: torch.device) -> Forward:
    original = own_forward(module)
    kernel, operands = call
    dtype, kernel_size = module.weight.dtype, tuple(module.kernel_size)
    channels, outputs, num_dims = module.in_channels, module.out_channels, len(kernel_size)

    def forward(*args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named:
            (x,) = args
            known = x.ndim == num_dims + 2 and x.shape[1] == channels
            plain = x.dtype is dtype and x.device == device and not x.requires_grad
            if known and plain:
                counts = tuple(n // k for n, k in zip(x.shape[2:], kernel_size, strict=True))
                if all(counts):
                    found = kernel(_patches(x, counts, kernel_size), *operands)
                    images = found.view(x.shape[0], *counts, outputs).movedim(-1, 1)
                    return images.contiguous(memory_format=_layout(x))
        return original(*args, **named)

    return forward


def _patches(x: Tensor, counts: tuple[int, ...], kernel_size: tuple[int, ...]) -> Tensor:
    """Return ``[B P, C * prod(kernel_size)]``; what is left over at the ends is not read."""
    num_dims = len(counts)
    for axis, (count, size) in enumerate(zip(counts, kernel_size, strict=True)):
        x = x.narrow(2 + axis, 0, count * size)
    parted = [each for pair in zip(counts, kernel_size, strict=True) for each in pair]
    x = x.reshape(*x.shape[:2], *parted)
    outer = [2 + 2 * axis for axis in range(num_dims)]
    inner = [3 + 2 * axis for axis in range(num_dims)]
    return x.permute(0, *outer, 1, *inner).reshape(-1, x.shape[1] * prod(kernel_size))


def _layout(x: Tensor) -> torch.memory_format:
    """Return the layout that torch's convolution gives its result for this input.

    That of volumes depends on the backend that torch chooses; whoever views a result as one row
    can do so if it is contiguous.
    """
    last = torch.channels_last
    if x.ndim == 4 and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        return last
    return torch.contiguous_format


def _by_rows(restore: Restore, into: Tensor) -> None:
    restore(into.view(into.shape[0], -1))


def _judge(module: Any, forward: Forward, rows: Tensor) -> Verdict:
    """Refuse unless ``forward`` computes what the module does."""
    # Two patches along each dimension, and some that are left over.
    sizes = [2 * size + min(1, size - 1) for size in module.kernel_size]
    x = signs((2, module.in_channels, *sizes), rows.dtype, rows.device)
    largest, rounded = largest_sum(rows, module.bias)
    return judge_calls(
        linear.tolerance, own_forward(module), forward, x, rows.shape[1] + 1, largest, rounded
    )
