"""The replacement."""

from __future__ import annotations

import torch

from interposer import Site
from interposer_ops.layers.norm import RMSNorm


class AcmeNorm(RMSNorm):
    """The standard layer, which counts the rows that it has normalised."""

    def __init__(self, site: Site, hidden_size: int, eps: float) -> None:
        super().__init__(site, hidden_size, eps)
        self.num_rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised, ``[..., H]``."""
        self.num_rows += x.shape[:-1].numel()
        return super().forward(x)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(normalised sum, sum)``."""
        self.num_rows += x.shape[:-1].numel()
        return super().forward_add(x, residual)
