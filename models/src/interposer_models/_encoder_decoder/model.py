"""The frame of an encoder-decoder: a decoder with its head, and an encoder beside it.

Dimensions: E tokens of sources, H hidden size of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from interposer_models._decoder.decoder import CausalLM, Decoder
from interposer_models._encoder_decoder.attention import CrossAttention, SourceStarts
from interposer_models._engine.sources import SourceBatch


class SourceEncoder(Decoder):
    """Embedding, blocks and the final norm of a text of which every token sees every other."""

    def encode(self, sources: SourceBatch) -> torch.Tensor:
        """Return the normalised hidden states ``[E, H]``."""
        x = self.embed(sources.token_ids, sources.positions)
        plan, residual = SourceStarts(sources.starts, sources.longest), None
        for block, angles in zip(self.layers, self.angles(sources.positions), strict=True):
            x, residual = block(x, residual, *angles, None, plan, None)
        normalised: torch.Tensor = self.norm.forward_add(x, residual)[0]  # type: ignore[operator]
        return normalised


class CrossDecoder(Decoder):
    """A decoder whose blocks attend to a source, without which none of them can be run."""

    one_by_one = False


class EncoderDecoderLM(CausalLM):
    """A decoder with its head, whose layers store what they read of an encoder's output.

    Attributes:
        encoder: given by whoever builds it.
    """

    decoder_type: ClassVar[type[Decoder]] = CrossDecoder
    encoder: SourceEncoder

    @property
    def max_source_tokens(self) -> int:
        """The longest source."""
        return self.encoder.config.max_position_embeddings

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute the angles of at least ``count`` positions of both, unless that is done."""
        super().reserve_positions(count, device)
        if not self.encoder.tables or count > len(self.encoder.tables[0][0]):
            self.encoder.reserve_positions(count, device)

    def encode(self, sources: SourceBatch, caches: Sequence[Any], plans: Sequence[Any]) -> None:
        """Compute sources and store what each layer reads of them; see ``SourceModel``."""
        hidden = self.encoder.encode(sources)
        places = {layer: place for place, layer in enumerate(self.attention_layers)}
        for module in self.model.modules():
            if isinstance(module, CrossAttention):
                place = places[module.attn]
                module.store(hidden, caches[place], plans[place])
