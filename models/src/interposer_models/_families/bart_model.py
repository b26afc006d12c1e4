"""BART's encoder, decoder and LM head, which share one embedding table.

Dimensions: T tokens, R tokens that need logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer_models._decoder.decoder import Decoder
from interposer_models._encoder_decoder.model import CrossDecoder, EncoderDecoderLM, SourceEncoder
from interposer_ops.layers.embedding import Embedding


class _NormedEmbeddings(Decoder):
    """Adds learned positions to scaled embeddings and normalises the sum."""

    def __init__(self, site: Site, config: Any, *parts: Any) -> None:
        super().__init__(site, config, *parts)
        self.layernorm_embedding = config.norm(site.at("layernorm_embedding"))

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the first block's input ``[T, H]``."""
        x: Tensor = self.embed_tokens(token_ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        assert self.embed_positions is not None
        x = x + self.embed_positions(positions + self.config.frame.first_position)
        return self.layernorm_embedding(x)  # type: ignore[no-any-return]


class BartDecoder(_NormedEmbeddings, CrossDecoder):
    """BART's decoder."""


class BartEncoder(_NormedEmbeddings, SourceEncoder):
    """BART's encoder."""


class LogitsBias(PluggableLayer):
    """Add a bias per token to the logits, unless all biases of the checkpoint are zero."""

    def __init__(self, site: Site, vocab_size: int) -> None:
        super().__init__(site)
        bias = nn.Parameter(torch.empty(1, vocab_size, dtype=site.dtype), requires_grad=False)
        bias.stored_as = site.prefix  # type: ignore[attr-defined]
        # Checkpoints without the tensor get zeros.
        bias.default = 0.0  # type: ignore[attr-defined]
        self.register_parameter("bias", bias)
        # In a tuple, so that torch does not register it as a second parameter.
        self.operands: tuple[Tensor, ...] = ()

    def finalize(self) -> None:
        """Keep the bias if it has a nonzero element."""
        bias = self.get_parameter("bias")
        self.operands = (bias,) if bias.any() else ()

    def forward(self, logits: Tensor) -> Tensor:
        """Add the bias to ``logits`` ``[R, V]``."""
        return logits + self.operands[0] if self.operands else logits


class BartLM(EncoderDecoderLM):
    """Encoder, decoder and LM head, which share one embedding table.

    Args:
        config, source: settings of the decoder and of the encoder.
    """

    decoder_type = BartDecoder

    def __init__(self, site: Site, config: Any, source: Any, page_size: int) -> None:
        head = site.at(config.frame.head)
        # Both sides and the head use this table; without it each would build its own.
        shared = Embedding(site.at("model.shared"), config.vocab_size, config.hidden_size, head)
        super().__init__(
            site, config, lambda at, i: config.block(at, i, page_size), config.last_norm, shared
        )
        self.encoder = BartEncoder(
            site.at(source.frame.decoder),
            source,
            lambda at, i: source.block(at, i, page_size),
            source.last_norm,
            None,
            shared,
        )
        self.final_logits_bias = LogitsBias(site.at("final_logits_bias"), config.vocab_size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the logits; see ``CausalModel``."""
        return self.final_logits_bias(super().forward(*args, **kwargs))  # type: ignore[no-any-return]
