"""One parametric decoder for Llama, Mistral, Qwen2, Qwen3, gpt-oss and other mixtures.

Dimensions: T tokens of the step, H hidden size, N heads, K kv heads, D head size, R rotated size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.config import DecoderConfig
from interposer_models._decoder.mixture import MixtureMLP
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.rotary import rotary_table

_FIRST_POSITIONS = 4096


class CausalLM(nn.Module):
    """A decoder with its language model head; module names are those of the checkpoints."""

    def __init__(self, site: Site, config: DecoderConfig, page_size: int) -> None:
        super().__init__()
        self.config = config
        head = site.at("lm_head")
        tied = config.tie_word_embeddings
        self.model = Decoder(site.at("model"), config, page_size, head if tied else None)
        self.lm_head = LMHead(
            head,
            config.vocab_size,
            config.hidden_size,
            self.model.embed_tokens if tied else None,
        )

    @property
    def attention_layers(self) -> list[Attention]:
        """Return the attention layers in order; cache i belongs to layer i."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def finalize(self, device: str) -> None:
        """Compute on ``device`` what no checkpoint stores; layers are finalized as they load."""
        self.model.reserve_positions(0, device)

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute the angles of at least ``count`` positions, unless that is done."""
        if count > len(self.model.cos):
            self.model.reserve_positions(count, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[torch.Tensor],
        plans: Sequence[object],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of the tokens that ``rows`` names, or of all.

        The last block computes what follows its attention for these tokens only.

        Args:
            token_ids: ``[T]`` int64.
            positions: ``[T]`` int64, within each token's own sequence.
            caches: one per layer, of its backend's layout.
            plans: one per layer, its backend's plan for this step.
            rows: ``[R]`` int64, indices into T.
        Returns: ``[R, V]`` or ``[T, V]``.
        """
        hidden = self.model(token_ids, positions, caches, plans, rows)
        return self.lm_head(hidden)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, blocks and the final norm; ``head`` is what shares the embedding, or None."""

    def __init__(
        self, site: Site, config: DecoderConfig, page_size: int, head: Site | None
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(
            site.at("embed_tokens"), config.vocab_size, config.hidden_size, head
        )
        self.layers = nn.ModuleList(
            _block(site.at(f"layers.{index}"), config, index, page_size)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(site.at("norm"), config.hidden_size, config.rms_norm_eps)

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute the angles of at least ``count`` positions, which no checkpoint stores.

        A table of all would be the larger the longer the context that a config claims.
        """
        config = self.config
        table = rotary_table(
            min(config.max_position_embeddings, max(2 * count, _FIRST_POSITIONS)),
            config.rotary_size,
            config.rope_theta,
            config.rope_scaling,
            config.max_position_embeddings,
        )
        self.cos, self.sin = (part.to(device) for part in table)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[torch.Tensor],
        plans: Sequence[object],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the normalised hidden states ``[T, H]``, or ``[R, H]`` of ``rows``."""
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.embed_tokens(token_ids)
        residual = None
        last = len(self.layers) - 1
        for index, block in enumerate(self.layers):
            wanted = rows if index == last else None
            x, residual = block(x, residual, cos, sin, caches[index], plans[index], wanted)
        return self.norm.forward_add(x, residual)[0]


def _block(site: Site, config: DecoderConfig, index: int, page_size: int) -> DecoderBlock:
    """Return block ``index``, with one perceptron or a mixture of experts."""
    mixture = config.mixture_of(index)

    def mlp(at: Site) -> nn.Module:
        if mixture:
            return MixtureMLP(site.at(mixture.block), config, mixture)
        return GatedMLP(
            at, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias
        )

    return DecoderBlock(
        site,
        config.hidden_size,
        config.rms_norm_eps,
        lambda at: _attention(at, config, index, page_size),
        mlp,
    )


def attention_layers(site: Site, config: DecoderConfig) -> Iterator[tuple[AttentionSpec, Site]]:
    """Yield spec and site of the attention of each block of a decoder, in pages of one token."""
    for index in range(config.num_hidden_layers):
        place = site.at(f"model.layers.{index}.self_attn")
        yield _spec(place, config, index, page_size=1), place.at("attn")


def _spec(site: Site, config: DecoderConfig, index: int, page_size: int) -> AttentionSpec:
    """Return what the attention of block ``index`` has to do; its cache is as the scheme has it."""
    heads, size = config.num_attention_heads, config.head_size
    scheme = site.resolver.scheme
    stored = scheme.cache_format(site.prefix) if scheme else None
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=config.num_kv_heads,
        head_size=size,
        dtype=site.dtype,
        cache_dtype=stored.dtype if stored else site.dtype,
        page_size=page_size,
        scale=size**-0.5,
        head_scales=stored.head_scales if stored else False,
        window_tokens=config.windows[index],
        sinks=config.traits.sinks,
    )


def _attention(site: Site, config: DecoderConfig, index: int, page_size: int) -> SelfAttention:
    return SelfAttention(
        site,
        _spec(site, config, index, page_size),
        config.hidden_size,
        config.rotary_size,
        config.rms_norm_eps if config.traits.qk_norm else None,
        config.qkv_bias,
        config.attention_bias,
    )
