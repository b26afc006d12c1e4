"""Layers that compute and quantize their result in one fused kernel, for the next layer.

A projection with one scale for all inputs can take quantized inputs. When both layers are built,
the preceding layer looks for a kernel that fuses the op of this layer with the quantization. If
only the reference implements the fused op, nothing is fused, since the reference would run both
steps one after the other; a note on the choice says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from interposer import BoundKernel, CustomOp, LinearMethod, Site
from interposer.records import Kernel

__all__ = ["bind_quantizing"]

_Dims = Mapping[str, int | float | str | bool]


def bind_quantizing(
    site: Site, receiver: nn.Module, *ops: tuple[CustomOp[..., Any], _Dims]
) -> tuple[BoundKernel[..., Any], ...]:
    """Bind fused kernels that quantize for a projection, which then takes quantized input.

    Args:
        site: site of the layer that quantizes.
        receiver: the projection, which must be the only reader of the layer's result.
        ops: each fused op with its dims; ``out_dtype`` is added here.
    Returns: the bound kernels; empty if nothing is fused.
    """
    method: Any = getattr(receiver, "method", None)
    if not isinstance(method, LinearMethod) or method.input_codes is None:
        return ()
    out_dtype = str(method.input_codes).removeprefix("torch.")
    kernels = tuple(site.bind_kernel(op, **dims, out_dtype=out_dtype) for op, dims in ops)
    # A reference is no Kernel record: the layers stay separate if any op has only a reference.
    method.takes_codes = all(isinstance(b.choice.chosen.record, Kernel) for b in kernels)
    note = "quantizes for the projection that comes next, whose inputs have one scale"
    if not method.takes_codes:
        note = "not called: no kernel fuses this op with the quantization of its result"
    resolver: Any = site.resolver
    for key, (choice, _) in [*resolver.choices.items()]:
        if any(choice is b.choice for b in kernels) and note not in choice.notes:
            resolver.annotate(key, note, idle=not method.takes_codes)
    return kernels if method.takes_codes else ()
