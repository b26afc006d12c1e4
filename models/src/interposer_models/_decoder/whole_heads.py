"""Decoders of the years before grouped queries."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from interposer_models._decoder.family import DecoderFamily


class WholeHeads(DecoderFamily):
    """A decoder with as many heads of keys and values as of queries, all of one hidden size."""

    @property
    def num_kv_heads(self) -> int:
        """Heads that keys and values have."""
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _whole_heads(self) -> Self:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads:
            raise ValueError(f"the hidden size {hidden} is not a multiple of {heads} heads")
        return self
