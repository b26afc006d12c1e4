"""The layers of Gemma 4: attention with normed heads, and blocks with an embedding of their own.

Source: transformers 5.23, models/gemma4.
Dimensions: T tokens, N heads, K kv heads, D head size, H hidden size, E size of the embedding of a
layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.blocks import NormedBlock
from interposer_models._decoder.decoder import Norm
from interposer_models._decoder.stored_attention import StoredAttention
from interposer_models._families.gemma2 import NORMS
from interposer_models._families.llama4 import UnitNorm
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.divided_pairs import QKV, PairNames, share_heads
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention


class Gemma4Attention(SelfAttention):
    """Attention with norms of query, key and value heads.

    Args:
        stored: it attends to what an earlier layer stored, and computes queries alone.
        valued: values have a projection of their own, else that of the keys.
    """

    q_norm: RMSNorm
    k_norm: RMSNorm

    def __init__(
        self,
        site: Site,
        spec: AttentionSpec,
        hidden_size: int,
        eps: float,
        bias: bool,
        *,
        stored: bool,
        valued: bool,
    ) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        self.stored = stored
        held = list(QKV)[: 1 if stored else 3 if valued else 2]
        names, outputs = PairNames("qkv_proj", "o_proj", bias, bias), {n: QKV[n] for n in held}
        shares = share_heads(site, spec, hidden_size, names, outputs)
        self.part_sizes = shares.sizes
        self.qkv_proj, self.o_proj = shares.first(), shares.last()
        self.q_norm = RMSNorm(site.at("q_norm"), size, eps)
        if not stored:
            self.k_norm = RMSNorm(site.at("k_norm"), size, eps)
            self.v_norm = UnitNorm(site.at("v_norm"), size, eps)
        self.rotary = RotaryEmbedding(site.at("rotary"), size, size)
        at: Any = site.at("attn")
        attention: Any = StoredAttention(at, shares.spec) if stored else shares.attention(at)
        self.attn = attention

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """Return query ``[T, N, D]``, and unless they are stored key and value ``[T, K, D]``."""
        merged = self.qkv_proj(x).split(self.part_sizes, dim=-1)
        query, *others = (part.unflatten(-1, (-1, self.head_size)) for part in merged)
        query = self.q_norm(query)
        if self.stored:
            # The kernel turns keys as well: a head takes their place.
            return self.rotary(query, query[:, :1], cos, sin)[:1]
        key, value = self.k_norm(others[0]), self.v_norm(others[-1])
        return (*self.rotary(query, key, cos, sin), value)


class LayerScale(PluggableLayer):
    """A factor of what leaves a block."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.factor = nn.Parameter(torch.empty(1, dtype=site.dtype), requires_grad=False)
        self.factor.stored_as = site.prefix  # type: ignore[attr-defined]

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return both times the factor."""
        return x * self.factor, stream * self.factor


class Gemma4Block(NormedBlock):
    """A block with norms around its parts, a gate of the layer's embedding, and a factor.

    Args:
        sizes: H and E; without E there is no gate.
    """

    def __init__(
        self,
        site: Site,
        norm: Norm,
        attention: nn.Module,
        mlp: nn.Module,
        sizes: tuple[int, int],
        activation: str,
    ) -> None:
        super().__init__(site, norm, NORMS, attention, mlp)
        self.scale = LayerScale(site.at("layer_scalar"))
        hidden, size = sizes
        if size:
            self.per_layer_input_gate = Linear(site.at("per_layer_input_gate"), hidden, size)
            act = site.at("per_layer_activation")
            self.activation = GatedActivation(act, activation, size)
            self.per_layer_projection = Linear(site.at("per_layer_projection"), size, hidden)
            self.post_per_layer_input_norm = norm(site.at("post_per_layer_input_norm"))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        plan: object,
        rows: Tensor | None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the stream, as ``NormedBlock``.

        Args:
            own: ``[T, E]``, embeddings of this layer.
        """
        x, stream = super().forward(x, residual, cos, sin, cache, plan, rows)
        if own is not None:
            stream = stream + x
            gate = self.per_layer_input_gate(stream.to(x.dtype))
            gated = self.activation(torch.cat((gate, own if rows is None else own[rows]), -1))
            x = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return self.scale(x, stream)  # type: ignore[no-any-return]
