"""A linear layer whose unquantized weight is stored as ``[inputs, outputs]``."""

from __future__ import annotations

from interposer import Site
from interposer_ops.layers.linear import Linear

_PLAIN = ("float64", "float32", "float16", "bfloat16")


class TransposedLinear(Linear):
    """A linear layer; checkpoints store its weight as ``[I, O]``, in memory it is ``[O, I]``.

    Weights that a quantization scheme stores in its own form are read as they are.
    """

    def __init__(self, site: Site, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(site, in_features, out_features, bias)
        self.mark(self)

    @staticmethod
    def mark(layer: Linear) -> None:
        """Mark an unquantized weight of ``layer`` as transposed in the checkpoint."""
        weight = layer._parameters.get("weight")
        if weight is not None and str(weight.dtype).removeprefix("torch.") in _PLAIN:
            weight.stored_transposed = True  # type: ignore[attr-defined]
