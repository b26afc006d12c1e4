"""The parts of an encoder-decoder that families share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from interposer import AttentionSpec, Site
from interposer_models._decoder.family import DecoderFamily


class EncoderDecoderFamily(DecoderFamily):
    """A decoder whose blocks attend to themselves, then to a source.

    A family adds the settings of the encoder, and builds both.
    """

    cross_name: ClassVar[str] = "cross_attn"

    def cross_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return what the attention of layer ``index`` to a source has to do.

        It sees all of the source, and its cache is of the model's dtype.
        """
        own = self.attention_spec(site, index, page_size)
        return replace(
            own,
            type="encoder_decoder",
            window_tokens=None,
            cache_dtype=own.dtype,
            head_scales=False,
        )

    def attention(self, site: Site) -> Iterator[tuple[AttentionSpec, Site]]:
        """Yield spec and site of both attentions of each block, in pages of one token."""
        yield from super().attention(site)
        for index in range(self.num_hidden_layers):
            place = site.at(f"{self.frame.decoder}.{self.frame.layers}.{index}.{self.cross_name}")
            yield self.cross_spec(place, index, page_size=1), place.at("attn")
