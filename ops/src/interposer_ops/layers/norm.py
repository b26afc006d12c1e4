"""RMS normalisation, with or without a residual stream."""

from __future__ import annotations

import torch
from torch import nn

from interposer import PluggableLayer, Site
from interposer_ops.norms import fused_add_rms_norm, rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(PluggableLayer):
    """Normalise over the last dimension; see the ops ``rms_norm`` and ``fused_add_rms_norm``."""

    layer_id = "rms_norm"

    def __init__(self, site: Site, hidden_size: int, eps: float) -> None:
        super().__init__(site)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=site.dtype), requires_grad=False)
        self.norm = site.bind(rms_norm, hidden_size=hidden_size)
        self.add_norm = site.bind(fused_add_rms_norm, hidden_size=hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised, ``[..., H]``."""
        return self.norm(x, self.weight, self.eps)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(normalised sum, sum)``; a missing residual counts as zero.

        The sum stays in float32 or wider, whatever the dtype of ``x``: rounding it after every
        block is the largest error of a model in 16 bits.
        """
        if residual is None:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return self.norm(x, self.weight, self.eps), wide
        return self.add_norm(x, residual, self.weight, self.eps)
