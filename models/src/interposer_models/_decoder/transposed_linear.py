"""A projection whose plain weight is stored as inputs by outputs."""

from __future__ import annotations

from interposer import Site
from interposer_ops.layers.linear import Linear

_PLAIN = ("float64", "float32", "float16", "bfloat16")


class TransposedLinear(Linear):
    """One projection; checkpoints have its weight as ``[I, O]``, and it is held as any other.

    What a scheme stores in a form of its own is read as it is.
    """

    def __init__(self, site: Site, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(site, in_features, out_features, bias)
        self.mark(self)

    @staticmethod
    def mark(layer: Linear) -> None:
        """Mark a plain weight of ``layer``."""
        weight = layer._parameters.get("weight")
        if weight is not None and str(weight.dtype).removeprefix("torch.") in _PLAIN:
            weight.stored_transposed = True  # type: ignore[attr-defined]
