"""mBART: BART with norms before its parts, and behind the last block of either side.

Source: arXiv:2001.08210.
"""

from __future__ import annotations

from functools import cached_property

from torch import nn

from interposer import Site
from interposer_models._decoder.settings import FrameNames
from interposer_models._encoder_decoder.blocks import CrossedBlock
from interposer_models._families.bart import Bart, BartSource

_NORMS = ("self_attn_layer_norm", "", "final_layer_norm", "")
_CROSSING = ("encoder_attn_layer_norm", "")


class MBart(Bart):
    """mBART; as settings, those of the decoder."""

    frame = FrameNames(
        "model.decoder", norm="layer_norm", positions="embed_positions", first_position=2
    )

    @cached_property
    def encoder(self) -> Bart:
        """The settings of the encoder."""
        return MBartSource.model_construct(**self.encoder_fields())

    def last_norm(self, site: Site) -> nn.Module:
        """Return the norm behind the last block."""
        return self.norm(site)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return block ``index`` of the decoder at a site."""
        at, cross = site.at("self_attn"), self.cross_attention(site, index, page_size)
        attention = self.self_attention(at, index, self.attention_spec(at, index, page_size))
        parts = attention, self.mlp(site, index)
        return CrossedBlock(site, self.norm, _NORMS, *parts, _CROSSING, cross, self.cross_name)


class MBartSource(BartSource):
    """The settings of mBART's encoder."""

    frame = FrameNames(
        "model.encoder", norm="layer_norm", positions="embed_positions", first_position=2
    )

    def last_norm(self, site: Site) -> nn.Module:
        """Return the norm behind the last block."""
        return self.norm(site)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Return block ``index`` at a site."""
        return self.normed_block(site, index, page_size, _NORMS)
