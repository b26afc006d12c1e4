"""Attention whose first projection is one tensor, under the names that its checkpoints have.

Dimensions: T tokens, N heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.attention import Unrotated
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention


@dataclass(frozen=True)
class FusedForm:
    """The form of a fused attention.

    Attributes:
        names: of the first and the last projection.
        linear: the class of both.
        rotary_size: 0 where nothing is rotated.
        by_head: query, key and value of a head stand beside each other, not those of all heads.
    """

    names: tuple[str, str]
    bias: bool
    linear: type[Linear] = Linear
    rotary_size: int = 0
    by_head: bool = False


class FusedAttention(SelfAttention):
    """Attention with as many heads of keys and values as of queries, and one first projection."""

    def __init__(self, site: Site, spec: AttentionSpec, hidden_size: int, form: FusedForm) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        width, (first, last) = spec.num_heads * size, form.names
        self.sizes, self.by_head = (width, width, width), form.by_head
        self.qkv_proj = form.linear(site.at(first), hidden_size, 3 * width, form.bias)  # type: ignore[assignment]
        self.o_proj = form.linear(site.at(last), width, hidden_size, form.bias)
        self.q_norm = self.k_norm = None
        rotary = RotaryEmbedding if form.rotary_size else Unrotated
        self.rotary = rotary(site.at("rotary"), size, form.rotary_size)
        self.attn = Attention(site.at("attn"), spec)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value ``[T, N, D]``, ready for the attention."""
        if not self.by_head:
            return super().heads(x, cos, sin)
        merged = self.qkv_proj(x).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = (part.contiguous() for part in merged.unbind(-2))
        return (*self.rotary(query, key, cos, sin), value)
