"""A replacement of the standard RMS norm layer that shows the kernels in ``print(model)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interposer_ops.layers.norm import RMSNorm


class ExampleNorm(RMSNorm):
    """The standard ``RMSNorm`` layer, with size and kernels in the printed form.

    The constructor is that of ``RMSNorm``: model code builds ``RMSNorm`` and gets this class.
    """

    def extra_repr(self) -> str:
        """Return the hidden size, epsilon and the names of the two selected kernels."""
        kernels = ", ".join(_name(function) for function in (self.norm, self.add_norm))
        return f"{self.weight.numel()}, eps={self.eps}, kernels: {kernels}"


def _name(function: Callable[..., Any]) -> str:
    # A partial object has no __name__, and a function of an extension module may lack __module__.
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if name and module else name or repr(function)
