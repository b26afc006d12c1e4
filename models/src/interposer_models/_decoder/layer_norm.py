"""Layer normalisation of the residual stream.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer_ops.norms import layer_norm


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
        """Prepare weight and bias for the kernel."""
        prepared = self.bound.prepared(weight=self.weight, bias=getattr(self, "bias", None))
        self.operands = prepared["weight"], prepared["bias"]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``[..., H]``."""
        return self.bound.function(x, *self.operands, self.eps)

    def forward_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream; return the normalised sum and the sum.

        A missing residual counts as zero. The sum stays in float32 or wider, as that of
        ``RMSNorm``.
        """
        stream_dtype = torch.promote_types(x.dtype, torch.float32)
        stream = x.to(stream_dtype) if residual is None else residual + x
        return self(stream.to(x.dtype)), stream
