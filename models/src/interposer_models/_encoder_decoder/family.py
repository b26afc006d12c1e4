"""Settings that all encoder-decoder families share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from interposer import AttentionSpec, Site
from interposer_models._decoder.family import DecoderFamily


class EncoderDecoderFamily(DecoderFamily):
    """A decoder with self-attention and cross-attention in each block.

    A family adds the settings of the encoder, and builds encoder and decoder.
    """

    cross_name: ClassVar[str] = "cross_attn"

    def cross_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Describe the cross-attention of layer ``index``.

        Cross-attention has no window, and a cache of the model's dtype.
        """
        self_spec = self.attention_spec(site, index, page_size)
        # Everything else, such as heads and scale, is as in self-attention.
        return replace(
            self_spec,
            type="encoder_decoder",
            window_tokens=None,
            cache_dtype=self_spec.dtype,
            head_scales=False,
        )

    def attention(self, site: Site) -> Iterator[tuple[AttentionSpec, Site]]:
        """Yield spec and site of both attentions of each block, in pages of one token."""
        yield from super().attention(site)
        for index in range(self.num_hidden_layers):
            cross_site = site.at(
                f"{self.frame.decoder}.{self.frame.layers}.{index}.{self.cross_name}"
            )
            yield self.cross_spec(cross_site, index, page_size=1), cross_site.at("attn")
