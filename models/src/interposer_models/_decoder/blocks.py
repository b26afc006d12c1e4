"""Blocks of decoders whose norms stand elsewhere than in Llama's.

Dimensions: T tokens, R tokens that matter, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import Site
from interposer_models._decoder.decoder import Norm

Names = tuple[str, str, str, str]


class NormedBlock(nn.Module):
    """Attention and MLP on a residual stream, with norms before them, behind them, or both.

    The stream is kept in float32 or wider, whatever the dtype of ``x``.

    Args:
        norm: returns the norm at a site.
        names: of the norms before and behind the attention, and before and behind the MLP; empty
            where there is none.
    """

    def __init__(
        self, site: Site, norm: Norm, names: Names, attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.names = attention, mlp, names
        for name in filter(None, names):
            self.add_module(name, norm(site.at(name)))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        plan: object,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output, not yet added, and the stream, as ``DecoderBlock``."""
        x, stream = self._entered(self.names[0], x, residual)
        x = self._left(self.names[1], self.self_attn(x, cos, sin, cache, plan, rows))
        if rows is not None:
            stream = stream[rows]
        x, stream = self._entered(self.names[2], x, stream)
        return self._left(self.names[3], self.mlp(x)), stream

    def _entered(self, name: str, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what a part reads, and the stream with ``x`` added."""
        if name:
            norm: Any = self._modules[name]
            return norm.forward_add(x, residual)  # type: ignore[no-any-return]
        wide = torch.promote_types(x.dtype, torch.float32)
        stream = x.to(wide) if residual is None else residual + x
        return stream.to(x.dtype), stream

    def _left(self, name: str, x: Tensor) -> Tensor:
        """Return what a part adds to the stream."""
        norm: Any = self._modules[name] if name else nn.Identity()
        return norm(x)  # type: ignore[no-any-return]


class OnePartBlock(nn.Module):
    """One part behind a norm on a residual stream, which is kept as that of ``NormedBlock``.

    Args:
        norm: returns the norm at a site.
        name: of the norm.
        part: it is called as attention is.
    """

    def __init__(self, site: Site, norm: Norm, name: str, part: nn.Module) -> None:
        super().__init__()
        self.norm: Any = norm(site.at(name))
        self.part = part

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        cache: Any,
        plan: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the part's output, not yet added, and the stream, as ``DecoderBlock``."""
        x, stream = self.norm.forward_add(x, residual)
        x = self.part(x, cos, sin, cache, plan, rows)
        return x, stream if rows is None else stream[rows]
