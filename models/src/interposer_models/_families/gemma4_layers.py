"""The layers of Gemma 4: attention with normed heads, and blocks with a per-layer embedding.

Source: transformers 5.23, models/gemma4.
Dimensions: T tokens, N heads, K kv heads, D head size, H hidden size, E size of a per-layer
embedding.
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
        stored: the layer reads an earlier layer's cache, and computes only queries.
        valued: values have a separate projection; otherwise the key projection gives both.
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
        projections = list(QKV)[: 1 if stored else 3 if valued else 2]
        names, outputs = (
            PairNames("qkv_proj", "o_proj", bias, bias),
            {n: QKV[n] for n in projections},
        )
        shards = share_heads(site, spec, hidden_size, names, outputs)
        self.part_sizes = shards.sizes
        self.qkv_proj, self.o_proj = shards.first(), shards.last()
        self.q_norm = RMSNorm(site.at("q_norm"), size, eps)
        if not stored:
            self.k_norm = RMSNorm(site.at("k_norm"), size, eps)
            self.v_norm = UnitNorm(site.at("v_norm"), size, eps)
        self.rotary = RotaryEmbedding(site.at("rotary"), size, size)
        attention_site: Any = site.at("attn")
        attention: Any = (
            StoredAttention(attention_site, shards.spec)
            if stored
            else shards.attention(attention_site)
        )
        self.attn = attention

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """Compute query ``[T, N, D]`` and, unless ``stored``, key and value ``[T, K, D]``."""
        merged = self.qkv_proj(x).split(self.part_sizes, dim=-1)
        query, *keys_and_values = (part.unflatten(-1, (-1, self.head_size)) for part in merged)
        query = self.q_norm(query)
        if self.stored:
            # The rotary kernel always rotates keys too; one query head stands in for them.
            return self.rotary(query, query[:, :1], cos, sin)[:1]
        key, value = self.k_norm(keys_and_values[0]), self.v_norm(keys_and_values[-1])
        return (*self.rotary(query, key, cos, sin), value)


class LayerScale(PluggableLayer):
    """A learned factor on a block's output and residual stream."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.factor = nn.Parameter(torch.empty(1, dtype=site.dtype), requires_grad=False)
        # Checkpoints store the scalar without a parameter name below it.
        self.factor.stored_as = site.prefix  # type: ignore[attr-defined]

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.factor, stream * self.factor


class Gemma4Block(NormedBlock):
    """A block with norms around the sublayers, a gated per-layer embedding, and a layer scale.

    Args:
        sizes: H and E; with E = 0 there is no per-layer embedding.
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
        layer_embedding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the residual stream, as ``NormedBlock``.

        Args:
            layer_embedding: ``[T, E]``, the embeddings of this layer.
        """
        x, stream = super().forward(x, residual, cos, sin, cache, plan, rows)
        if layer_embedding is not None:
            stream = stream + x
            gate = self.per_layer_input_gate(stream.to(x.dtype))
            gated = self.activation(
                torch.cat((gate, layer_embedding if rows is None else layer_embedding[rows]), -1)
            )
            x = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return self.scale(x, stream)  # type: ignore[no-any-return]
