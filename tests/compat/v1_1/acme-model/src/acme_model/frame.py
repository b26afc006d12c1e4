"""A decoder in a frame of its own. T tokens, H hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interposer import AttentionSpec, CausalModel, ModelFamily, PluggableLayer, Site
from interposer.errors import CheckpointError
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.rotary import rotary_table

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


class Offset(PluggableLayer):
    """Add nothing: a layer of the plugin's own, which is finalized once its weights are there."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.is_final = False

    def finalize(self) -> None:
        """Remember the call."""
        self.is_final = True

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        if not self.is_final:
            raise RuntimeError("was not finalized")
        return x


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, site: Site, family: Acme, spec: AttentionSpec) -> None:
        super().__init__()
        hidden, at = family.hidden_size, site.at("self_attn")
        self.sizes = [spec.num_heads * spec.head_size] + [spec.num_kv_heads * spec.head_size] * 2
        self.head_size = spec.head_size
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.first = RMSNorm(site.at("input_layernorm"), hidden, family.eps)
        self.qkv = MergedLinear(at.at("qkv_proj"), hidden, parts)
        self.rotary = RotaryEmbedding(at.at("rotary"), spec.head_size, spec.head_size)
        self.attn = Attention(at.at("attn"), spec)
        self.out = Linear(at.at("o_proj"), self.sizes[0], hidden)
        self.second = RMSNorm(site.at("post_attention_layernorm"), hidden, family.eps)
        self.mlp = GatedMLP(site.at("mlp"), hidden, family.intermediate_size, "silu")

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: Tensor, plan: Any) -> Tensor:
        """Return ``[T, H]``."""
        merged = self.qkv(self.first(x)).split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in merged)
        query, key = self.rotary(query, key, *angles)
        x = x + self.out(self.attn(query, key, value, cache, plan).flatten(1))
        return x + self.mlp(self.second(x))


class AcmeModel(CausalModel):
    """Embedding, blocks, norm and a head that shares the embedding."""

    def __init__(self, site: Site, family: Acme, page_size: int) -> None:
        super().__init__()
        self.config = family
        inner, head = site.at("model"), site.at("lm_head")
        sizes = family.vocab_size, family.hidden_size
        self.embedding = Embedding(inner.at("embed_tokens"), *sizes, head)
        self.offset = Offset(inner.at("offset"))
        self.blocks = nn.ModuleList(
            Block(inner.at(f"layers.{i}"), family, family.spec(site, page_size))
            for i in range(family.num_layers)
        )
        self.norm = RMSNorm(inner.at("norm"), family.hidden_size, family.eps)
        self.head = LMHead(head, *sizes, self.embedding)
        self.table: tuple[Tensor, Tensor] | None = None

    @property
    def attention_layers(self) -> Sequence[Any]:
        """Return the layers with a cache, in order."""
        return [block.attn for block in self.blocks]

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute the angles of all positions once."""
        if self.table is None:
            family = self.config
            cos, sin = rotary_table(family.max_position_embeddings, family.head_size, 10000.0)
            self.table = cos.to(device), sin.to(device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Tensor],
        plans: Sequence[object],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of all tokens, or of ``rows``."""
        cos, sin = (part[positions] for part in self.table)
        x = self.offset(self.embedding(token_ids))
        for block, cache, plan in zip(self.blocks, caches, plans, strict=True):
            x = block(x, (cos, sin), cache, plan)
        if rows is not None:
            x = x[rows]
        return self.head(self.norm(x))


class Acme(ModelFamily):
    """The settings of one checkpoint."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name in _SIZES:
            setattr(self, name, config[name])
        self.num_layers = config["num_hidden_layers"]
        self.eps = config.get("rms_norm_eps", 1e-6)
        self.head_size = config.get("head_dim") or self.hidden_size // self.num_attention_heads
        self.dtype = config.get("dtype", "float32")
        self.quantization_config = config.get("quantization_config")

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Acme:
        """Return the settings; a missing size is told."""
        for name in _SIZES:
            if not isinstance(config.get(name), int):
                raise CheckpointError(source, f"{name} is missing", "mend the field")
        return cls(config)

    def spec(self, site: Site, page_size: int) -> AttentionSpec:
        """Return what the attention of each layer has to do."""
        return AttentionSpec(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_size=self.head_size,
            dtype=site.dtype,
            cache_dtype=site.dtype,
            page_size=page_size,
            scale=self.head_size**-0.5,
        )

    def attention(self, site: Site) -> Iterator[tuple[AttentionSpec, Site]]:
        """Yield spec and site of each attention layer."""
        for index in range(self.num_layers):
            yield self.spec(site, 1), site.at(f"model.layers.{index}.self_attn.attn")

    def build(self, site: Site, page_size: int) -> AcmeModel:
        """Return the model."""
        if torch.get_default_device().type != "meta":
            raise RuntimeError("is to be built on the meta device")
        return AcmeModel(site, self, page_size)
