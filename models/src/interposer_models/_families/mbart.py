"""mBART: BART with norms before each sublayer and after the last block of encoder and decoder.

Source: arXiv:2001.08210.
"""

from __future__ import annotations

from functools import cached_property

from torch import nn

from interposer import Site
from interposer_models._decoder.settings import FrameNames
from interposer_models._encoder_decoder.blocks import CrossedBlock
from interposer_models._families.bart import Bart, BartEncoderSettings

_NORMS = ("self_attn_layer_norm", "", "final_layer_norm", "")
_CROSSING = ("encoder_attn_layer_norm", "")


class MBart(Bart):
    """The settings of mBART's decoder."""

    frame = FrameNames(
        "model.decoder", norm="layer_norm", positions="embed_positions", first_position=2
    )

    @cached_property
    def encoder(self) -> Bart:
        """The settings of the encoder."""
        return MBartEncoderSettings.model_construct(**self.encoder_fields())

    def last_norm(self, site: Site) -> nn.Module:
        """Build the norm after the last block."""
        return self.norm(site)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build block ``index`` of the decoder at a site."""
        attention_site, cross = site.at("self_attn"), self.cross_attention(site, index, page_size)
        attention = self.self_attention(
            attention_site, index, self.attention_spec(attention_site, index, page_size)
        )
        sublayers = attention, self.mlp(site, index)
        return CrossedBlock(site, self.norm, _NORMS, *sublayers, _CROSSING, cross, self.cross_name)


class MBartEncoderSettings(BartEncoderSettings):
    """The settings of mBART's encoder."""

    frame = FrameNames(
        "model.encoder", norm="layer_norm", positions="embed_positions", first_position=2
    )

    def last_norm(self, site: Site) -> nn.Module:
        """Build the norm after the last block."""
        return self.norm(site)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build block ``index`` of the encoder at a site."""
        return self.normed_block(site, index, page_size, _NORMS)
