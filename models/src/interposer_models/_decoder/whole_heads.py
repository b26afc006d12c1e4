"""Decoders with multi-head attention: as many key and value heads as query heads."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from interposer_models._decoder.family import DecoderFamily


class MultiHeadFamily(DecoderFamily):
    """A decoder with multi-head attention: the heads together have the hidden size."""

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _sound_heads(self) -> Self:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads:
            raise ValueError(f"the hidden size {hidden} is not a multiple of {heads} heads")
        return self
