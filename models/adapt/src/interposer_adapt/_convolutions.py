"""Convolutions over disjoint patches, computed as one matmul of the patches.

Dimensions: B images, C channels, O output channels, P patches of an image.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_adapt._adaptation import Adaptation, kernel_name
from interposer_adapt._agreement import check_calls, random_signs
from interposer_adapt._forwards import Forward, class_forward
from interposer_adapt._packed_weight import PackedWeight, Restore
from interposer_adapt._projections import Call, find_restore, largest_row_sum, release_weight
from interposer_ops.linear import linear

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Patches with fewer elements are slower as a matmul than as torch's convolution, for any number of
# images; measured by `benchmarks/adapt.py convolutions`.
_MIN_PATCH_ELEMENTS = {torch.bfloat16: 768, torch.float32: 1536}


def bind_convolution(adaptation: Adaptation, module: Any, name: str) -> str | Verdict:
    """Bind a convolution over adjacent, large enough patches to a matmul kernel."""
    verdict = adaptation.check_module(module)
    if not verdict:
        return verdict
    verdict = _check_form(module, adaptation.device)
    if not verdict:
        return verdict
    weight, bias = module.weight, module.bias
    rows = weight.detach().flatten(1)
    # No quantization scheme supports convolutions, so the site is bound to a plain kernel.
    bound_kernel = adaptation.site(name, weight.dtype).bind_kernel(
        linear, in_features=rows.shape[1], out_features=rows.shape[0], biased=bias is not None
    )
    prepared = bound_kernel.prepared(weight=rows, bias=None if bias is None else bias.detach())
    call: Call = bound_kernel.function, (prepared["weight"], prepared["bias"])
    restore = find_restore(bound_kernel, call[1])
    if restore is None:
        return Verdict.refuse(
            "torch's is as fast: no kernel of 'linear' packs its weight, which would pay for "
            "copying the patches"
        )
    forward = _forward(module, call, adaptation.device)
    verdict = _check_forward(module, forward, rows)
    if not verdict:
        return verdict
    packed = PackedWeight(weight, partial(_restore_flat, restore), f"{name}.weight")
    verdict = release_weight(adaptation, [(module, "weight")], weight, packed)
    if not verdict:
        return verdict
    adaptation.bind_forward(module, name, forward)
    return kernel_name(bound_kernel.choice)


def _check_form(module: Any, device: torch.device) -> Verdict:
    """Refuse a convolution that is not a matmul of patches, or that torch computes faster."""
    if module.groups != 1 or any(size != 1 for size in module.dilation):
        return Verdict.refuse("torch's stays: it has groups or dilation, so it is no single matmul")
    if module.kernel_size != module.stride or any(module._reversed_padding_repeated_twice):
        return Verdict.refuse(
            "torch's is faster: its windows overlap or are padded, and copying them costs more "
            "than a kernel saves"
        )
    size, dtype = prod(module.weight.shape[1:]), module.weight.dtype
    if device.type != "cpu" or dtype not in _MIN_PATCH_ELEMENTS:
        return Verdict.refuse(
            f"torch's stays: a matmul of patches was not measured for {dtype} on {device.type}"
        )
    if size < _MIN_PATCH_ELEMENTS[dtype]:
        return Verdict.refuse(
            f"torch's is faster: its patches have {size} elements, and copying them pays from "
            f"{_MIN_PATCH_ELEMENTS[dtype]} on for {dtype}"
        )
    return Verdict.accept()


def _forward(module: Any, call: Call, device: torch.device) -> Forward:
    original = class_forward(module)
    kernel, operands = call
    dtype, kernel_size = module.weight.dtype, tuple(module.kernel_size)
    channels, outputs, num_dims = module.in_channels, module.out_channels, len(kernel_size)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            has_shape = x.ndim == num_dims + 2 and x.shape[1] == channels
            is_plain = x.dtype is dtype and x.device == device and not x.requires_grad
            if has_shape and is_plain:
                counts = tuple(n // k for n, k in zip(x.shape[2:], kernel_size, strict=True))
                # Inputs smaller than one patch raise in the original.
                if all(counts):
                    rows = kernel(_patches(x, counts, kernel_size), *operands)
                    images = rows.view(x.shape[0], *counts, outputs).movedim(-1, 1)
                    return images.contiguous(memory_format=_layout(x))
        return original(*args, **kwargs)

    return forward


def _patches(x: Tensor, counts: tuple[int, ...], kernel_size: tuple[int, ...]) -> Tensor:
    """Return patches as rows ``[B P, C * prod(kernel_size)]``, without incomplete end patches."""
    num_dims = len(counts)
    for axis, (count, size) in enumerate(zip(counts, kernel_size, strict=True)):
        x = x.narrow(2 + axis, 0, count * size)
    split_shape = [length for pair in zip(counts, kernel_size, strict=True) for length in pair]
    x = x.reshape(*x.shape[:2], *split_shape)
    outer = [2 + 2 * axis for axis in range(num_dims)]
    inner = [3 + 2 * axis for axis in range(num_dims)]
    return x.permute(0, *outer, 1, *inner).reshape(-1, x.shape[1] * prod(kernel_size))


def _layout(x: Tensor) -> torch.memory_format:
    """Return the memory format of torch's convolution result for this input.

    torch's format for volumes depends on its backend; a contiguous result can be viewed in any
    case.
    """
    last = torch.channels_last
    if x.ndim == 4 and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        return last
    return torch.contiguous_format


def _restore_flat(restore: Restore, into: Tensor) -> None:
    restore(into.view(into.shape[0], -1))


def _check_forward(module: Any, forward: Forward, rows: Tensor) -> Verdict:
    """Refuse unless ``forward`` computes the same convolution as the module's class."""
    # Two patches along each dimension, and an incomplete third one.
    sizes = [2 * size + min(1, size - 1) for size in module.kernel_size]
    x = random_signs((2, module.in_channels, *sizes), rows.dtype, rows.device)
    largest, rounded = largest_row_sum(rows, module.bias)
    return check_calls(
        linear.tolerance, class_forward(module), forward, x, rows.shape[1] + 1, largest, rounded
    )
