"""Decoder blocks with norms in other positions than Llama's.

Dimensions: T tokens, R tokens to output, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import Site
from interposer_models._decoder.decoder import Norm

Names = tuple[str, str, str, str]


class NormedBlock(nn.Module):
    """Attention and MLP on a residual stream, with norms before or after each, or both.

    The residual stream is kept in float32 or wider, independent of the dtype of ``x``.

    Args:
        norm: builds the norm at a site.
        names: of the norms before and after the attention, then before and after the MLP; an empty
            name means no norm.
    """

    def __init__(
        self, site: Site, norm: Norm, names: Names, attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.names = attention, mlp, names
        # The norms keep the names of the checkpoint, so their parameters load without a mapping.
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
        """Return the block's output, not yet added, and the residual stream, as ``DecoderBlock``.

        Returns: both ``[T, H]``, or ``[R, H]`` of the tokens in ``rows``.
        """
        x, stream = self._sublayer_input(self.names[0], x, residual)
        x = self._sublayer_output(self.names[1], self.self_attn(x, cos, sin, cache, plan, rows))
        if rows is not None:
            stream = stream[rows]
        x, stream = self._sublayer_input(self.names[2], x, stream)
        return self._sublayer_output(self.names[3], self.mlp(x)), stream

    def _sublayer_input(
        self, name: str, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream; return the sublayer's normed input and the stream."""
        if name:
            norm: Any = self._modules[name]
            return norm.forward_add(x, residual)  # type: ignore[no-any-return]
        # Without a norm before the sublayer, the stream still adds x and stays in float32.
        stream_dtype = torch.promote_types(x.dtype, torch.float32)
        stream = x.to(stream_dtype) if residual is None else residual + x
        return stream.to(x.dtype), stream

    def _sublayer_output(self, name: str, x: Tensor) -> Tensor:
        norm: Any = self._modules[name] if name else nn.Identity()
        return norm(x)  # type: ignore[no-any-return]


class OnePartBlock(nn.Module):
    """One sublayer after one norm, on a residual stream that is kept like that of ``NormedBlock``.

    Args:
        norm: builds the norm at a site.
        name: of the norm.
        part: the sublayer, called with the arguments of attention.
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
        """Return the sublayer's output, not yet added, and the stream, as ``DecoderBlock``."""
        x, stream = self.norm.forward_add(x, residual)
        x = self.part(x, cos, sin, cache, plan, rows)
        # The sublayer has dropped the other rows already.
        return x, stream if rows is None else stream[rows]
