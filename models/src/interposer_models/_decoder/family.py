"""Base class of model families: settings from config.json that also build the decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import nn

from interposer import AttentionSpec, CausalModel, Config, Site
from interposer.errors import ConfigError
from interposer.tooling import UINT4
from interposer_models._decoder.decoder import CausalLM, Names, NormedBlock
from interposer_models._decoder.mtp_head import PredictionHead
from interposer_models._decoder.settings import DecoderSettings
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.sharding import local_spec

# Dtypes of the caches that a user can ask for.
_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int4": UINT4}
_CACHE_BITS = {"fp8": 8, "int4": 4}


def _option(config: Config) -> str:
    return f"Config(kv_cache={config.kv_cache!r})"


def stored_as(site: Site) -> tuple[torch.dtype, bool]:
    """Return the dtype of an attention layer's KV cache, and whether each head has its own scale.

    Raises: ConfigError: the config sets ``kv_cache``, but the checkpoint has scales of its own.
    """
    scheme = site.resolver.scheme
    cache_format = scheme.cache_format(site.prefix) if scheme else None
    # The checkpoint's format if its scheme quantizes the cache, else the model's dtype.
    config = site.resolver.config
    if config.kv_cache == "auto":
        return (
            (cache_format.dtype, cache_format.head_scales) if cache_format else (site.dtype, False)
        )
    if cache_format is not None:
        raise ConfigError(
            f"{_option(config)} was requested, but the checkpoint stores the cache of "
            f"{site.prefix!r} as {cache_format.dtype}, with its own scales. Try: leave kv_cache "
            "out, or remove the scheme of the cache from quantization_config"
        )
    return _CACHE_DTYPES[config.kv_cache], False


def cache_note(model: CausalModel, config: Config, page_size: int) -> str:
    """Return a note on the bytes per token of the KV cache that ``kv_cache`` asks for; "" without.

    Raises: ConfigError: no layer can store such a cache.
    """
    if config.kv_cache == "auto":
        return ""
    cache_dtype, bits = _CACHE_DTYPES[config.kv_cache], _CACHE_BITS[config.kv_cache]
    layers = [a for a in model.attention_layers if a.backend.spec.cache_dtype == cache_dtype]
    if not layers:
        raise ConfigError(
            f"{_option(config)} was requested, but no layer of {type(model).__name__} can store "
            f"keys and values in {bits} bits. Try: leave kv_cache out"
        )
    token_bytes = sum(layer.backend.kv_layout().page_bytes() for layer in layers) / page_size
    specs = [layer.backend.spec for layer in layers]
    dtype = str(specs[0].dtype).removeprefix("torch.")
    plain_bytes = sum(2 * s.num_kv_heads * s.head_size * s.dtype.itemsize for s in specs)
    return (
        f"Keys and values are stored in {bits} bits, as kv_cache says: a token takes "
        f"{token_bytes:.0f} bytes in {len(layers)} layers, of {plain_bytes} in {dtype}"
    )


class DecoderFamily(DecoderSettings):
    """Base of families with RMSNorm, rotary embedding, grouped-query attention and a gated MLP.

    A family adds fields, changes the defaults of others, and overrides the methods of the parts
    that differ.
    """

    attention_name: ClassVar[str] = "self_attn"

    def attends(self, index: int) -> bool:
        """Say whether block ``index`` has attention layers."""
        return True

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec of layer ``index``, by which an attention backend is selected.

        The cache dtype follows the user's config or the quantization scheme.
        """
        cache_dtype, head_scales = stored_as(site)
        return AttentionSpec(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=site.dtype,
            cache_dtype=cache_dtype,
            page_size=page_size,
            scale=self.head_size**-0.5,
            head_scales=head_scales,
            window_tokens=self.windows[index],
            prefix_lm=self.runs_attend_both_ways and self.has_encoder,
        )

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the self-attention module of layer ``index``, with its projections."""
        bias = self.attention_bias
        return SelfAttention(site, spec, self.hidden_size, self.rotary_size, None, bias, bias)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MLP or MoE layer of layer ``index``."""
        sizes = self.hidden_size, self.intermediate_size
        return GatedMLP(block.at("mlp"), *sizes, self.hidden_act, self.mlp_bias)

    def norm(self, site: Site) -> nn.Module:
        """Build an RMSNorm of the residual stream for the module path ``site``."""
        return RMSNorm(site, self.hidden_size, self.rms_norm_eps)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build decoder block ``index``, with the forward signature of ``DecoderBlock``."""
        return DecoderBlock(
            site,
            self.hidden_size,
            self.rms_norm_eps,
            lambda at: self.self_attention(at, index, self.attention_spec(at, index, page_size)),
            lambda _: self.mlp(site, index),
        )

    def normed_block(self, site: Site, index: int, page_size: int, names: Names) -> nn.Module:
        """Build a block with norms at the positions that ``names`` defines; see ``NormedBlock``."""
        attention_site = site.at("self_attn")
        attention = self.self_attention(
            attention_site, index, self.attention_spec(attention_site, index, page_size)
        )
        return NormedBlock(site, self.norm, names, attention, self.mlp(site, index))

    def attention(self, site: Site) -> Iterator[tuple[AttentionSpec, Site]]:
        """Yield the attention spec and module path of each block, for pages of one token."""
        for index in filter(self.attends, range(self.num_hidden_layers)):
            attention_site = site.at(
                f"{self.frame.decoder}.{self.frame.layers}.{index}.{self.attention_name}"
            )
            yield (
                # The spec of this rank's shard of the heads.
                local_spec(attention_site, self.attention_spec(attention_site, index, page_size=1)),
                attention_site.at("attn"),
            )

    def prediction_head(self, site: Site, model: CausalLM, page_size: int) -> PredictionHead | None:
        """Build the MTP head that the family's checkpoints contain; None if there is none.

        Args:
            model: the result of ``build``; the head shares modules with it.
        """
        return None

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head."""
        return CausalLM(site, self, lambda at, index: self.block(at, index, page_size), self.norm)


class MultiHeadFamily(DecoderFamily):
    """Base of families with multi-head attention, whose heads together have the hidden size."""

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Number of elements of one head."""
        return self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads:
            raise ValueError(f"the hidden size {hidden} is not a multiple of {heads} heads")
        return self
