"""The self-attention of an encoder, and the cross-attention of a decoder to the encoder's output.

Dimensions: T tokens of a step, E tokens of encoder inputs, B encoder inputs, N heads, K kv heads,
D head size, H hidden size, R rotary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_ops.attention import ragged_attention
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.divided_pairs import PairNames, share_heads
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.self_attention import SelfAttention


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """The start of each encoder input, ``[B + 1]`` int64, and the length of the longest one."""

    starts: Tensor
    longest: int


class EncoderAttention(SelfAttention):
    """Attention of every token to all tokens of the encoder input, or to a window on either side.

    Nothing is cached.

    Args:
        spec: the window counts the query token and the tokens on one side.
        rotary_size: R; 0 without rotary embedding.
        bias: of all projections.
    """

    def __init__(
        self, site: Site, spec: AttentionSpec, hidden_size: int, rotary_size: int, bias: bool
    ) -> None:
        PluggableLayer.__init__(self, site)
        names = PairNames("qkv_proj", self.part_names[0], bias, bias)
        shards = share_heads(site, spec, hidden_size, names)
        self.spec = spec = shards.spec
        self.head_size = size = spec.head_size
        self.sizes = shards.sizes
        self.qkv_proj, self.o_proj = shards.first(), shards.last()
        self.q_norm = self.k_norm = None
        self.rotary = self.rotary_type(site.at("rotary"), size, rotary_size)
        self.attend = site.at("attn").bind(
            ragged_attention,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=size,
            value_size=size,
            causal=False,
            windowed=spec.window_tokens is not None,
            softcapped=spec.softcap is not None,
            sinks=False,
            alibi=False,
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, plan: Any, rows: Tensor | None
    ) -> Tensor:
        """Compute the output projection ``[E, H]``.

        Args:
            x: ``[E, H]``.
            cos, sin: ``[E, R / 2]``, float32 or wider.
            cache: ignored.
            plan: an ``EncoderBatch``.
            rows: ignored; all tokens are computed.
        """
        query, key, value = self.heads(x, cos, sin)
        starts, longest, spec = plan.starts, plan.longest, self.spec
        lengths = starts, starts, longest, longest
        scores = spec.scale, False, spec.window_tokens, spec.softcap
        mixed = self.attend(query, key, value, *lengths, *scores, None, None)
        return self.o_proj(mixed.flatten(1))  # type: ignore[no-any-return]


class CrossAttention(PluggableLayer):
    """Attention of a decoder's tokens to the cached keys and values of an encoder input.

    Args:
        spec: of the type ``encoder_decoder``.
        source_size: hidden size of the encoder.
        out: name of the output projection.
        bias: of all projections.
    """

    def __init__(
        self,
        site: Site,
        spec: AttentionSpec,
        hidden_size: int,
        source_size: int,
        out: str = "o_proj",
        bias: bool = False,
    ) -> None:
        super().__init__(site)
        self.head_size = size = spec.head_size
        width, kv_width = spec.num_heads * size, spec.num_kv_heads * size
        parts = {"k_proj": kv_width, "v_proj": kv_width}
        self.q_proj = Linear(site.at("q_proj"), hidden_size, width, bias)
        self.kv_proj = MergedLinear(site.at("kv_proj"), source_size, parts, bias)
        self.o_proj = Linear(site.at(out), width, hidden_size, bias)
        self.attn = Attention(site.at("attn"), spec)

    def store(self, source: Tensor, cache: Any, plan: Any) -> None:
        """Cache keys and values of an encoder's output ``[E, source_size]``.

        Args:
            plan: has the slots ``[E]`` to write to.
        """
        key, value = self.kv_proj(source).unflatten(-1, (-1, self.head_size)).chunk(2, -2)
        # Without queries the backend only writes.
        query = source.new_empty(0, self.attn.spec.num_heads, self.head_size)
        self.attn(query, key, value, cache, plan)

    def forward(self, x: Tensor, cache: Any, plan: Any, rows: Tensor | None) -> Tensor:
        """Compute the output projection ``[T, H]``, or ``[rows, H]`` of the tokens in ``rows``."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_size))
        mixed = self.attn.backend.forward_stored(query, cache, plan)
        if rows is not None:
            mixed = mixed[rows]
        return self.o_proj(mixed.flatten(1))  # type: ignore[no-any-return]
