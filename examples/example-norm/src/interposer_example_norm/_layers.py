"""A replacement of the standard norm layer that prints its kernel with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interposer_ops.layers.norm import RMSNorm


class ExampleNorm(RMSNorm):
    """The standard layer, and ``print(model)`` shows its size and the kernels it calls."""

    def extra_repr(self) -> str:
        """Return the hidden size, epsilon and the two functions that the selection bound."""
        kernels = ", ".join(_name(function) for function in (self.norm, self.add_norm))
        return f"{self.weight.numel()}, eps={self.eps}, kernels: {kernels}"


def _name(function: Callable[..., Any]) -> str:
    # Not every callable has a name, nor every function of an extension module a module.
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if name and module else name or repr(function)
