"""A family that is derived from the common decoder, and overrides what can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from interposer import AttentionSpec, Site
from interposer.errors import UnsupportedModelError
from interposer_models.families import DecoderFamily
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention


class Derived(DecoderFamily):
    """Llama, with a window and a factor of scores that config.json may state."""

    acme_factor: float = 1.0

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Derived:
        """Refuse what is not computed here."""
        if config.get("acme_flag"):
            raise UnsupportedModelError(source, "acme_flag is not computed")
        return super().parse(config, source)

    def slides(self, index: int) -> bool:
        """Say that every second layer has the window."""
        return index % 2 == 1

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return what attention has to do."""
        spec = super().attention_spec(site, index, page_size)
        return replace(spec, scale=spec.scale * self.acme_factor)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Return the attention at a site."""
        sizes = self.hidden_size, self.rotary_size
        return SelfAttention(site, spec, *sizes, None, self.attention_bias, self.attention_bias)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the MLP."""
        sizes = self.hidden_size, self.intermediate_size
        return GatedMLP(block.at("mlp"), *sizes, self.hidden_act, self.mlp_bias)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return the block."""
        return DecoderBlock(
            site,
            self.hidden_size,
            self.rms_norm_eps,
            lambda at: self.self_attention(at, index, self.attention_spec(at, index, page_size)),
            lambda _: self.mlp(site, index),
        )
