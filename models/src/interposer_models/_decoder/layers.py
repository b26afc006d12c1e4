"""Layers of older decoders: MLP without a gate, LayerNorm, and transposed linear layers.

Dimensions: T tokens, H hidden size, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer.errors import UnknownNameError
from interposer_ops.activations import gelu, quick_gelu, relu2
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.tensor_parallel.projection_pairs import ProjectionNames, shard_mlp
from interposer_ops.norms import layer_norm

Names = tuple[str, str]
"""The names of the up and the down projection in checkpoints."""

# GELU spellings of transformers, by the op's ``approximate`` argument.
_FORMS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu": "none"}
_OPS = {"quick_gelu": quick_gelu, "relu2": relu2}
_RELU = "relu"


class PlainMLP(nn.Module):
    """MLP without a gate: two linear layers with GELU, ReLU or squared ReLU in between.

    Args:
        sizes: H and the intermediate size.
        names: names of the projections below the site.
        linear: the layer class of both projections.
    """

    def __init__(
        self,
        site: Site,
        sizes: tuple[int, int],
        names: Names,
        activation: str,
        bias: bool,
        linear: type[Linear] = Linear,
    ) -> None:
        super().__init__()
        if activation not in (known_activations := (*_FORMS, *_OPS, _RELU)):
            raise UnknownNameError("activation", activation, known_activations)
        hidden, intermediate = sizes
        outputs = {names[0].rpartition(".")[2]: 1}
        shards = shard_mlp(
            site, hidden, intermediate, ProjectionNames(*names, bias, bias), outputs, linear
        )
        intermediate = shards.size
        self.first = shards.first()
        self.activate: Callable[..., Tensor] = torch.relu
        self.options: tuple[str, ...] = ()
        activation_site = site.at("act")
        if activation in _OPS:
            self.activate = activation_site.bind(_OPS[activation], intermediate_size=intermediate)
        elif activation in _FORMS:
            self.options = (_FORMS[activation],)
            self.activate = activation_site.bind(
                gelu, intermediate_size=intermediate, approximate=_FORMS[activation]
            )
        self.second = shards.last()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP: ``[T, H]`` from ``x`` ``[T, H]``."""
        return self.second(self.activate(self.first(x), *self.options))  # type: ignore[no-any-return]


class LayerNorm(PluggableLayer):
    """Layer norm over the last dimension; see the op ``layer_norm``.

    Args:
        bias: whether there is one.
    """

    def __init__(self, site: Site, hidden_size: int, eps: float, bias: bool = True) -> None:
        super().__init__(site)
        self.eps = eps
        for name in ("weight", "bias") if bias else ("weight",):
            empty = torch.empty(hidden_size, dtype=site.dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bound = site.bind_kernel(
            layer_norm, hidden_size=hidden_size, weighted=True, biased=bias
        )
        self.operands: tuple[Tensor | None, Tensor | None] = (None, None)

    def finalize(self) -> None:
        """Prepare the norm's weight and bias for the kernel."""
        prepared = self.bound.prepared(weight=self.weight, bias=getattr(self, "bias", None))
        self.operands = prepared["weight"], prepared["bias"]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the rows of ``x``, ``[..., H]``."""
        return self.bound.function(x, *self.operands, self.eps)

    def forward_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream; return the normalised sum and the sum.

        A missing residual counts as zero. The sum stays in float32 or wider, as that of
        ``RMSNorm``.
        """
        stream_dtype = torch.promote_types(x.dtype, torch.float32)
        stream = x.to(stream_dtype) if residual is None else residual + x
        return self(stream.to(x.dtype)), stream


_PLAIN = ("float64", "float32", "float16", "bfloat16")


class TransposedLinear(Linear):
    """A linear layer whose weight ``[O, I]`` is stored as ``[I, O]`` in checkpoints.

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
