"""A linear layer with an unquantized weight that checkpoints store as ``[inputs, outputs]``."""

from __future__ import annotations

from interposer import Site
from interposer_ops.layers.linear import Linear

_PLAIN = ("float64", "float32", "float16", "bfloat16")


class TransposedLinear(Linear):
    """A linear layer with a weight ``[O, I]`` in memory and ``[I, O]`` in checkpoints.

    Weights that a quantization scheme stores in another form are read unchanged.
    """

    def __init__(self, site: Site, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(site, in_features, out_features, bias)
        self.mark(self)

    @staticmethod
    def mark(layer: Linear) -> None:
        """Mark an unquantized weight of ``layer`` as transposed in the checkpoint."""
        weight = layer._parameters.get("weight")
        if weight is not None and str(weight.dtype).removeprefix("torch.") in _PLAIN:
            # The loader transposes a marked weight.
            weight.stored_transposed = True  # type: ignore[attr-defined]
