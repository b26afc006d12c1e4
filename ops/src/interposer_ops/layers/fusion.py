"""Layers that quantize what they return for the one that comes next, by one kernel.

A projection whose inputs all have one scale can be given their codes. The layer before it asks for
a kernel that computes both steps when the two are built. Where there is none but the reference,
which would only do one after the other, both stay as they are, and the choice says so.
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
    """Return kernels that quantize for a projection, which takes codes from now on; or none.

    Args:
        site: of the layer that quantizes.
        receiver: the projection; nothing else may read what the layer returns.
        ops: with dims, to which that of the codes is added.
    """
    method: Any = getattr(receiver, "method", None)
    if not isinstance(method, LinearMethod) or method.input_codes is None:
        return ()
    codes = str(method.input_codes).removeprefix("torch.")
    bound = tuple(site.bind_kernel(op, **dims, out_dtype=codes) for op, dims in ops)
    method.takes_codes = all(isinstance(b.choice.chosen.record, Kernel) for b in bound)
    note = "quantizes for the projection that comes next, whose inputs have one scale"
    if not method.takes_codes:
        note = "not called: this step and the quantizer run apart, as no kernel computes both"
    resolver: Any = site.resolver
    for key, (choice, _) in [*resolver.choices.items()]:
        if any(choice is b.choice for b in bound) and note not in choice.notes:
            resolver.annotate(key, note, idle=not method.takes_codes)
    return bound if method.takes_codes else ()
