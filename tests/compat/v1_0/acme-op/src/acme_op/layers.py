"""A layer id of its own."""

from __future__ import annotations

import torch
from torch import nn

from acme_op.shift import acme_shift
from interposer import PluggableLayer, Site


class Shift(PluggableLayer):
    """Rotate by three places and add an offset."""

    layer_id = "acme_shift"

    def __init__(self, site: Site, size: int) -> None:
        super().__init__(site)
        self.offset = nn.Parameter(torch.zeros(size, dtype=site.dtype), requires_grad=False)
        self.bound = site.bind_kernel(acme_shift, size=size)

    def finalize(self) -> None:
        """Prepare the offset for the kernel."""
        self.constant = self.bound.prepared(offset=self.offset)["offset"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[T, S]``."""
        return self.bound.function(x, self.constant, 3)
