"""The frame of BART: both sides begin alike, and the head has a bias.

Dimensions: T tokens, R tokens whose logits are wanted, H hidden size, V vocabulary.
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
    """Normalises embeddings, scaled, with learned positions added."""

    def __init__(self, site: Site, config: Any, *parts: Any) -> None:
        super().__init__(site, config, *parts)
        self.layernorm_embedding = config.norm(site.at("layernorm_embedding"))

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return what the first block gets, ``[T, H]``."""
        x: Tensor = self.embed_tokens(token_ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        assert self.embed_positions is not None
        x = x + self.embed_positions(positions + self.config.frame.first_position)
        return self.layernorm_embedding(x)  # type: ignore[no-any-return]


class BartDecoder(_NormedEmbeddings, CrossDecoder):
    """The decoder."""


class BartEncoder(_NormedEmbeddings, SourceEncoder):
    """The encoder."""


class LogitsBias(PluggableLayer):
    """Add what the checkpoint has for each token, mostly zeros, which are left out."""

    def __init__(self, site: Site, vocab_size: int) -> None:
        super().__init__(site)
        bias = nn.Parameter(torch.empty(1, vocab_size, dtype=site.dtype), requires_grad=False)
        bias.stored_as = site.prefix  # type: ignore[attr-defined]
        bias.default = 0.0  # type: ignore[attr-defined]
        self.register_parameter("bias", bias)
        # In a tuple, so that it is no parameter of its own.
        self.operands: tuple[Tensor, ...] = ()

    def finalize(self) -> None:
        """Keep the bias if it is one."""
        bias = self.get_parameter("bias")
        self.operands = (bias,) if bias.any() else ()

    def forward(self, logits: Tensor) -> Tensor:
        """Return ``[R, V]`` of ``logits`` ``[R, V]``."""
        return logits + self.operands[0] if self.operands else logits


class BartLM(EncoderDecoderLM):
    """Both sides, which share a table of embeddings with the head.

    Args:
        config, source: settings of the decoder and of the encoder.
    """

    decoder_type = BartDecoder

    def __init__(self, site: Site, config: Any, source: Any, page_size: int) -> None:
        head = site.at(config.frame.head)
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
        """Return the logits, see ``CausalModel``."""
        return self.final_logits_bias(super().forward(*args, **kwargs))  # type: ignore[no-any-return]
