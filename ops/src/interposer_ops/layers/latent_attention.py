"""Parts of latent attention (MLA) that a platform's decoder block may compute in one call.

Dimensions: T tokens, H hidden size, N heads, D size of a query and key head without its rotary
part, R rotary size, C latent size, V size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from interposer_ops.layers.attention import Attention
from interposer_ops.layers.head_linear import HeadLinear
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding

__all__ = ["AbsorbedProjection", "HasLatentParts", "LatentParts"]


class AbsorbedProjection(Protocol):
    """The module of the projection from latent vectors to keys and values, split by heads.

    Attributes:
        head_layers: the layers that project queries to C and attention outputs to V elements.
        head_operands: the prepared weights of these layers; replaced when the weight changes.
    """

    head_layers: tuple[HeadLinear, ...]
    head_operands: tuple[Any, ...]


@dataclass(frozen=True)
class LatentParts:
    """The parts of a latent attention layer, whose computation is:

        query = query_projection(query_norm(query_compression(x))), or query_projection(x)
        latent, key = vector_projection(x), of C and R elements
        vectors to cache = [vector_norm(latent), rotated key]
        output(absorbed values(attn([absorbed query, rotated query], vectors)))

    Attributes:
        query_compression, query_norm: None if queries are projected directly.
        sizes: D, R, C and V.
    """

    query_compression: Linear | None
    query_norm: RMSNorm | None
    query_projection: Linear
    vector_projection: Linear
    vector_norm: RMSNorm
    rotary: RotaryEmbedding
    absorption: AbsorbedProjection
    attn: Attention
    output: Linear
    sizes: tuple[int, int, int, int]


class HasLatentParts(Protocol):
    """A latent attention layer that lets a decoder block compute its parts."""

    def latent_parts(self) -> LatentParts | None:
        """Return the parts; None if the layer computes anything else than ``LatentParts`` says."""
        ...
