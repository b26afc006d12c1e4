"""An encoder-decoder model: a decoder with an LM head, and an encoder.

Dimensions: E tokens of encoder inputs, H hidden size of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from interposer_models._decoder.decoder import CausalLM, Decoder
from interposer_models._encoder_decoder.attention import CrossAttention, EncoderBatch
from interposer_models._engine.sources import SourceBatch


class SourceEncoder(Decoder):
    """An encoder: embedding, blocks with bidirectional attention, and the final norm."""

    def encode(self, sources: SourceBatch) -> torch.Tensor:
        """Compute the normalised hidden states ``[E, H]``."""
        x = self.embed(sources.token_ids, sources.positions)
        plan, residual = EncoderBatch(sources.starts, sources.longest), None
        for block, angles in zip(self.layers, self.angles(sources.positions), strict=True):
            x, residual = block(x, residual, *angles, None, plan, None)
        normalised: torch.Tensor = self.norm.forward_add(x, residual)[0]  # type: ignore[operator]
        return normalised


class CrossDecoder(Decoder):
    """A decoder with cross-attention; no block can run without an encoder's output."""

    can_run_block_by_block = False


class EncoderDecoderLM(CausalLM):
    """A decoder with an LM head and an encoder; cross-attention caches the encoder's output.

    Attributes:
        encoder: set by the subclass or the family that builds the model.
    """

    decoder_type: ClassVar[type[Decoder]] = CrossDecoder
    encoder: SourceEncoder

    @property
    def max_source_tokens(self) -> int:
        """The most tokens of an encoder input."""
        return self.encoder.config.max_position_embeddings

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute the angles of at least ``count`` positions for encoder and decoder."""
        super().reserve_positions(count, device)
        if not self.encoder.tables or count > len(self.encoder.tables[0][0]):
            self.encoder.reserve_positions(count, device)

    def encode(self, sources: SourceBatch, caches: Sequence[Any], plans: Sequence[Any]) -> None:
        """Encode inputs, and cache each cross-attention's keys and values; see ``SourceModel``."""
        hidden = self.encoder.encode(sources)
        cache_indices = {
            # Caches follow the order of attention layers, self-attention and cross-attention alike.
            layer: cache_index
            for cache_index, layer in enumerate(self.attention_layers)
        }
        for module in self.model.modules():
            if isinstance(module, CrossAttention):
                cache_index = cache_indices[module.attn]
                module.store(hidden, caches[cache_index], plans[cache_index])
