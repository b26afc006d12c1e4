"""RMS normalisation, with or without a residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer_ops.norms._norms import fused_add_rms_norm, rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(PluggableLayer):
    """Normalise over the last dimension; see the ops ``rms_norm`` and ``fused_add_rms_norm``."""

    layer_id = "rms_norm"

    def __init__(self, site: Site, hidden_size: int, eps: float) -> None:
        super().__init__(site)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=site.dtype), requires_grad=False)
        plain = site.bind_kernel(rms_norm, hidden_size=hidden_size)
        stream = str(_stream_dtype(site.dtype)).removeprefix("torch.")
        sizes = {"hidden_size": hidden_size}
        adding = site.bind_kernel(fused_add_rms_norm, **sizes, residual_dtype=stream)
        self.norm, self.add_norm = plain.function, adding.function
        self._bound = plain, adding
        # In a tuple, so that they are no parameters of their own.
        self.constants: tuple[Any, Any] = (self.weight, self.weight)

    def finalize(self) -> None:
        """Prepare the weight for each of the two kernels."""
        plain, adding = (bound.prepared(weight=self.weight)["weight"] for bound in self._bound)
        self.constants = plain, adding

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, ``[..., H]``."""
        return self.norm(x, self.constants[0], self.eps)

    def forward_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``(normalised sum, sum)``; a missing residual counts as zero.

        The sum stays in float32 or wider, whatever the dtype of ``x``: rounding it after every
        block is the largest error of a model in 16 bits.
        """
        if residual is None:
            return self.norm(x, self.constants[0], self.eps), x.to(_stream_dtype(x.dtype))
        return self.add_norm(x, residual, self.constants[1], self.eps)


def _stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the sum of all block outputs is kept."""
    return torch.promote_types(dtype, torch.float32)
