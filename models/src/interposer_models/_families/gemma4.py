"""Gemma 4: per-layer embeddings, and layers that read the KV cache of an earlier layer.

The text model without experts. Full-attention layers have larger heads than windowed layers.

Source: transformers 5.23, models/gemma4.

Dimensions: T tokens, N heads, K kv heads, D head size, H hidden size, L layers, E size of a
per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.attention import SharedCacheAttention, connect_cache_readers
from interposer_models._decoder.decoder import CausalLM, Decoder, Norm, NormedBlock
from interposer_models._decoder.embedded_rows import EmbeddedRows
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Positive, WindowTokens, nested_rotation
from interposer_models._families.gemma import NORMS, Cap, CappedLM
from interposer_models._families.llama4 import UnitNorm
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.embedding import Embedding
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.projection_pairs import (
    QKV,
    ProjectionNames,
    shard_attention,
)


class Gemma4Attention(SelfAttention):
    """Self-attention with norms of query, key and value heads.

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
            ProjectionNames("qkv_proj", "o_proj", bias, bias),
            {n: QKV[n] for n in projections},
        )
        shards = shard_attention(site, spec, hidden_size, names, outputs)
        self.part_sizes = shards.sizes
        self.qkv_proj, self.o_proj = shards.first(), shards.last()
        self.q_norm = RMSNorm(site.at("q_norm"), size, eps)
        if not stored:
            self.k_norm = RMSNorm(site.at("k_norm"), size, eps)
            self.v_norm = UnitNorm(site.at("v_norm"), size, eps)
        self.rotary = RotaryEmbedding(site.at("rotary"), size, size)
        attention_site: Any = site.at("attn")
        attention: Any = (
            SharedCacheAttention(attention_site, shards.spec)
            if stored
            else shards.attention(attention_site)
        )
        self.attn = attention

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """Compute query ``[T, N, D]``, and key and value ``[T, K, D]`` unless ``stored``."""
        merged = self.qkv_proj(x).split(self.part_sizes, dim=-1)
        query, *keys_and_values = (part.unflatten(-1, (-1, self.head_size)) for part in merged)
        query = self.q_norm(query)
        if self.stored:
            # The rotary kernel always rotates keys too; one query head stands in for them.
            return self.rotary(query, query[:, :1], cos, sin)[:1]
        key, value = self.k_norm(keys_and_values[0]), self.v_norm(keys_and_values[-1])
        return (*self.rotary(query, key, cos, sin), value)


class LayerScale(PluggableLayer):
    """A learned factor that scales the sum of a block's output and residual stream."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.factor = nn.Parameter(torch.empty(1, dtype=site.dtype), requires_grad=False)
        # Checkpoints store the scalar without a parameter name below it.
        self.factor.stored_as = site.prefix  # type: ignore[attr-defined]

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.factor, stream * self.factor


class Gemma4Block(NormedBlock):
    """Decoder block with norms around sublayers, gated per-layer embedding and layer scale.

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
        """Return the block's output and the residual stream, as ``NormedBlock`` does.

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


Count = Annotated[int, Field(ge=0, le=10_000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Heads = dict[Literal["head_dim", "num_key_value_heads"], Positive]


class Gemma4Decoder(Decoder):
    """Decoder with per-layer embeddings, in which some layers share KV caches."""

    config: Gemma4

    def __init__(self, site: Site, config: Gemma4, *parts: Any) -> None:
        super().__init__(site, config, *parts)
        connect_cache_readers(self.layers.modules())
        self.size = size = config.hidden_size_per_layer_input
        self.can_run_block_by_block = not (size or config.num_kv_shared_layers)
        if size:
            width, name = config.num_hidden_layers * size, "per_layer_projection_norm"
            table_site = site.at("embed_tokens_per_layer")
            self.embed_tokens_per_layer = Embedding(
                table_site, config.vocab_size_per_layer_input, width
            )
            projection_site = site.at("per_layer_model_projection")
            self.per_layer_model_projection = Linear(projection_site, config.hidden_size, width)
            self.per_layer_projection_norm = RMSNorm(site.at(name), size, config.rms_norm_eps)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor | None,
        embedded: EmbeddedRows | None = None,
    ) -> Tensor:
        """Compute the final hidden states; see ``Decoder``."""
        if embedded is not None:
            # Tokens of an encoder have no ids, and get the per-layer embeddings of padding.
            padding = self.config.pad_token_id
            token_ids = token_ids.index_fill(0, embedded.rows, padding)
        return super().forward(token_ids, positions, caches, plans, rows, embedded)

    def extra_block_inputs(self, token_ids: Tensor, x: Tensor) -> list[tuple[Tensor, ...]]:
        """Return each layer's extra embeddings ``[T, E]``: a lookup plus a projection of ``x``."""
        if not self.size:
            return [()] * len(self.layers)
        # All layers' embeddings are stored side by side in one wide table.
        looked_up = self.embed_tokens_per_layer(token_ids) * self.size**0.5
        projected = self.per_layer_model_projection(x) * self.config.hidden_size**-0.5
        normed = self.per_layer_projection_norm(projected.unflatten(-1, (-1, self.size)))
        combined = (normed + looked_up.view_as(normed)) * 2**-0.5  # [T, L, E]
        return [(combined[:, index].contiguous(),) for index in self.block_indices]


class Gemma4LM(CappedLM):
    """A ``Gemma4Decoder`` with an LM head and soft-capped logits."""

    decoder_type = Gemma4Decoder


class Gemma4(DecoderFamily):
    """Settings of Gemma 4's text model, which also build the decoder."""

    reads_partial_rotary_factor: ClassVar[bool] = True
    reads_layer_types: ClassVar[bool] = True
    num_key_value_heads: Positive | None = 4
    head_dim: Positive | None = 256
    global_head_dim: Positive = 512
    num_global_key_value_heads: Positive | None = None
    per_layer_config: dict[int, Heads] | None = None
    attention_k_eq_v: bool = False
    hidden_act: str = Field(
        default="gelu_pytorch_tanh",
        validation_alias=AliasChoices("hidden_activation", "hidden_act"),
    )
    tie_word_embeddings: bool = True
    sliding_window: WindowTokens | None = 512
    final_logit_softcapping: Cap | None = None
    hidden_size_per_layer_input: Count = 256
    vocab_size_per_layer_input: Positive = 262144
    num_kv_shared_layers: Count = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    pad_token_id: TokenId = 0
    use_bidirectional_attention: str | None = None

    @property
    def embedding_scale(self) -> float:
        """The factor by which token embeddings are multiplied."""
        return float(self.hidden_size**0.5)

    def slides(self, index: int) -> bool:
        """Return True if layer ``index`` slides: all but every sixth and the last layer."""
        return (index + 1) % 6 != 0 and index + 1 < self.num_hidden_layers

    def is_reader(self, index: int) -> bool:
        """Say whether layer ``index`` reads the KV cache of an earlier layer."""
        return index >= self.num_hidden_layers - self.num_kv_shared_layers

    def heads(self, index: int) -> Heads:
        """Return the size and the number of the kv heads of layer ``index``."""
        heads: Heads = {"head_dim": self.head_size, "num_key_value_heads": self.num_kv_heads}
        # Overrides the rule below, layer by layer.
        if self.per_layer_config is not None:
            return {**heads, **self.per_layer_config.get(index, {})}
        if self.windows[index] is None:
            heads["head_dim"] = self.global_head_dim
            if self.attention_k_eq_v and self.num_global_key_value_heads:
                heads["num_key_value_heads"] = self.num_global_key_value_heads
        return heads

    def rotary_size_at(self, index: int) -> int:
        """Return the number of rotated elements of layer ``index``: the whole head size."""
        return self.heads(index)["head_dim"]

    @classmethod
    def merged_rotation(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary fields: ``rope_parameters``, which must be nested by layer type."""
        return nested_rotation(fields)

    def rotation(self, index: int) -> tuple[float, dict[str, Any]]:
        """Return the rotary base and scaling of a layer; defaults are those of the release."""
        if self.rope_parameters:
            return super().rotation(index)
        if self.windows[index] is None:
            return 1000000.0, {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        return 10000.0, {}

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec; the score scale is 1, because queries and keys are normed."""
        heads = self.heads(index)
        return replace(
            super().attention_spec(site, index, page_size),
            head_size=heads["head_dim"],
            num_kv_heads=heads["num_key_value_heads"],
            scale=1.0,
            shared=self.num_kv_shared_layers > 0,
        )

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with norms of query, key and value heads."""
        is_full_attention = spec.window_tokens is None
        return Gemma4Attention(
            site,
            spec,
            self.hidden_size,
            self.rms_norm_eps,
            self.attention_bias,
            stored=self.is_reader(index),
            valued=not (self.attention_k_eq_v and is_full_attention),
        )

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the gated MLP, which is up to twice as wide in layers that read another's cache."""
        wider = 2 if self.use_double_wide_mlp and self.is_reader(index) else 1
        sizes = self.hidden_size, wider * self.intermediate_size
        return GatedMLP(block.at("mlp"), *sizes, self.hidden_act)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build decoder block ``index``."""
        at = site.at("self_attn")
        spec = self.attention_spec(at, index, page_size)
        attention = self.self_attention(at, index, spec)
        sizes = self.hidden_size, self.hidden_size_per_layer_input
        mlp = self.mlp(site, index)
        return Gemma4Block(site, self.norm, attention, mlp, sizes, self.hidden_act)

    def renamed(self, name: str) -> str | None:
        """Return a tensor's name; None for keys and values of layers that read another's cache."""
        parts = name.split(".")
        if "self_attn" in parts and parts[-2][:2] in ("k_", "v_"):
            return None if self.is_reader(int(parts[parts.index("self_attn") - 1])) else name
        return name

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head."""
        return Gemma4LM(site, self, page_size, self.final_logit_softcapping)

    @model_validator(mode="after")
    def _refuse_unsupported_fields(self) -> Self:
        if self.enable_moe_block:
            raise ValueError("enable_moe_block is true: experts of Gemma 4 are not computed")
        if self.use_bidirectional_attention not in (None, "vision"):
            mode = self.use_bidirectional_attention
            raise ValueError(f"use_bidirectional_attention is {mode!r}, which is not supported")
        block_indices = range(self.num_hidden_layers)
        # A reader needs an earlier writer with the same window and the same heads.
        kinds = {
            (self.is_reader(i), self.windows[i], *self.heads(i).values()) for i in block_indices
        }
        if not all((False, *kind) in kinds for is_reader, *kind in kinds if is_reader):
            raise ValueError(
                f"num_kv_shared_layers is {self.num_kv_shared_layers}: one of these layers has no "
                "earlier layer with the same window and heads to share a cache with"
            )
        return self
