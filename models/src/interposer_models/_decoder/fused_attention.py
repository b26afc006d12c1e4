"""Attention for checkpoints that store query, key and value projections as one tensor.

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
    """How a checkpoint stores a fused attention.

    Attributes:
        names: of the QKV projection and of the output projection.
        linear: the layer class of both projections.
        rotary_size: rotated elements of a head; 0 without rotary embedding.
        by_head: the rows are grouped by head (q0 k0 v0 q1 ...), not by kind (q0 q1 ... k0 ...).
    """

    names: tuple[str, str]
    bias: bool
    linear: type[Linear] = Linear
    rotary_size: int = 0
    by_head: bool = False


class FusedAttention(SelfAttention):
    """Multi-head attention (as many kv heads as query heads) with one QKV projection."""

    def __init__(self, site: Site, spec: AttentionSpec, hidden_size: int, form: FusedForm) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        names = PairNames(*form.names, form.bias, form.bias)
        # Sharding must know the order of the rows: three values per head, or three blocks of heads.
        axes = (("query", 3),) if form.by_head else (("query", 1),) * 3
        outputs = {form.names[0].rpartition(".")[2]: axes}
        shards = share_heads(site, spec, hidden_size, names, outputs, form.linear)
        self.sizes, self.by_head = shards.sizes, form.by_head
        self.qkv_proj, self.o_proj = shards.first(), shards.last()
        self.q_norm = self.k_norm = None
        rotary = RotaryEmbedding if form.rotary_size else Unrotated
        self.rotary = rotary(site.at("rotary"), size, form.rotary_size)
        self.attn = shards.attention(site.at("attn"))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value ``[T, N, D]``, ready for the attention."""
        if not self.by_head:
            return super().heads(x, cos, sin)
        merged = self.qkv_proj(x).unflatten(-1, (-1, 3, self.head_size))
        # Kernels take contiguous tensors; unbind returns strided views.
        query, key, value = (part.contiguous() for part in merged.unbind(-2))
        return (*self.rotary(query, key, cos, sin), value)
