"""Attention whose first projection is one tensor, under the names that its checkpoints have.

Dimensions: T tokens, N heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.attention import Unrotated
from interposer_ops.layers.divided_pairs import PairNames, share_heads
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
        names = PairNames(*form.names, form.bias, form.bias)
        axes = (("query", 3),) if form.by_head else (("query", 1),) * 3
        outputs = {form.names[0].rpartition(".")[2]: axes}
        shares = share_heads(site, spec, hidden_size, names, outputs, form.linear)
        self.sizes, self.by_head = shares.sizes, form.by_head
        self.qkv_proj, self.o_proj = shares.first(), shares.last()
        self.q_norm = self.k_norm = None
        rotary = RotaryEmbedding if form.rotary_size else Unrotated
        self.rotary = rotary(site.at("rotary"), size, form.rotary_size)
        self.attn = shares.attention(site.at("attn"))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value ``[T, N, D]``, ready for the attention."""
        if not self.by_head:
            return super().heads(x, cos, sin)
        merged = self.qkv_proj(x).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = (part.contiguous() for part in merged.unbind(-2))
        return (*self.rotary(query, key, cos, sin), value)
