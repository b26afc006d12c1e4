"""Encoder-decoder models: an encoder, and a decoder with cross-attention to the encoder's output.

``EncoderDecoderFamily`` holds the settings, ``EncoderDecoderLM`` is the model, ``CrossedBlock`` the
decoder block.

Dimensions: T tokens of a step, R tokens to output, E tokens of encoder inputs, B encoder inputs, M
features of a frame, F frames, N heads, K kv heads, D head size, H hidden size, R rotary size where
angles are meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.decoder import CausalLM, Decoder, Names, Norm, NormedBlock
from interposer_models._decoder.family import DecoderFamily
from interposer_ops.attention import ragged_attention
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.projection_pairs import ProjectionNames, shard_attention


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """Offsets of the encoder inputs, ``[B + 1]`` int64, and the length of the longest input."""

    starts: Tensor
    longest: int


class EncoderAttention(SelfAttention):
    """Self-attention of an encoder: to all tokens of the input, or to a window on both sides.

    Nothing is cached.

    Args:
        spec: the window counts the query token and the tokens on one side.
        rotary_size: R; 0 without rotary embedding.
        bias: all projections have a bias.
    """

    def __init__(
        self, site: Site, spec: AttentionSpec, hidden_size: int, rotary_size: int, bias: bool
    ) -> None:
        PluggableLayer.__init__(self, site)
        names = ProjectionNames("qkv_proj", self.part_names[0], bias, bias)
        shards = shard_attention(site, spec, hidden_size, names)
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
        """Compute attention and output projection, ``[E, H]``.

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
    """Cross-attention of decoder tokens to the cached keys and values of an encoder input.

    Args:
        spec: an attention spec of type ``encoder_decoder``.
        source_size: hidden size of the encoder.
        out: name of the output projection.
        bias: all projections have a bias.
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
        """Compute keys and values of an encoder's output ``[E, source_size]``, and cache both.

        Args:
            plan: has the slots ``[E]`` to write to.
        """
        key, value = self.kv_proj(source).unflatten(-1, (-1, self.head_size)).chunk(2, -2)
        # Without queries the backend only writes.
        query = source.new_empty(0, self.attn.spec.num_heads, self.head_size)
        self.attn(query, key, value, cache, plan)

    def forward(self, x: Tensor, cache: Any, plan: Any, rows: Tensor | None) -> Tensor:
        """Compute cross-attention and output projection: ``[T, H]``, or ``[rows, H]``."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_size))
        mixed = self.attn.read(query, cache, plan)
        if rows is not None:
            mixed = mixed[rows]
        return self.o_proj(mixed.flatten(1))  # type: ignore[no-any-return]


class CrossedBlock(NormedBlock):
    """Decoder block as ``NormedBlock``, with cross-attention after self-attention.

    Args:
        crossing: the names of the norms before and after the cross-attention; an empty name means
            no norm.
        cross: the cross-attention.
        cross_name: the module name of the cross-attention.
    """

    def __init__(
        self,
        site: Site,
        norm: Norm,
        names: Names,
        attention: nn.Module,
        mlp: nn.Module,
        crossing: tuple[str, str],
        cross: nn.Module,
        cross_name: str,
    ) -> None:
        super().__init__(site, norm, names, attention, mlp)
        self.crossing, self.cross_name = crossing, cross_name
        self.add_module(cross_name, cross)
        for name in filter(None, crossing):
            self.add_module(name, norm(site.at(name)))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        plan: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output, not yet added, and the residual stream, as ``DecoderBlock``.

        Args:
            cache, plan: two of each: for self-attention and for cross-attention.
        """
        cross: Any = self._modules[self.cross_name]
        x, stream = self._sublayer_input(self.names[0], x, residual)
        # The plan of the cross-attention counts all T tokens, so rows are dropped only after it.
        x = self._sublayer_output(
            self.names[1], self.self_attn(x, cos, sin, cache[0], plan[0], None)
        )
        x, stream = self._sublayer_input(self.crossing[0], x, stream)
        x = self._sublayer_output(self.crossing[1], cross(x, cache[1], plan[1], rows))
        if rows is not None:
            stream = stream[rows]
        x, stream = self._sublayer_input(self.names[2], x, stream)
        return self._sublayer_output(self.names[3], self.mlp(x)), stream


class EncoderDecoderFamily(DecoderFamily):
    """Base of families whose decoder has self-attention and cross-attention in each block.

    A family adds the settings of the encoder, and builds encoder and decoder.
    """

    cross_name: ClassVar[str] = "cross_attn"

    def cross_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec of the cross-attention of layer ``index``.

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
        """Yield attention spec and module path of each block's self- and cross-attention."""
        yield from super().attention(site)
        for index in range(self.num_hidden_layers):
            cross_site = site.at(
                f"{self.frame.decoder}.{self.frame.layers}.{index}.{self.cross_name}"
            )
            yield self.cross_spec(cross_site, index, page_size=1), cross_site.at("attn")


@dataclass(frozen=True, slots=True)
class EncoderInputBatch:
    """Complete encoder inputs of several sequences, packed without padding.

    Attributes:
        token_ids, positions: ``[E]`` int64; positions count from the start of each input. Token
            ids are 0 if the encoder reads features.
        starts: ``[B + 1]`` int64; input b has the entries ``starts[b]`` to ``starts[b + 1] - 1``.
        longest: Length of the longest input.
        features: ``[B, M, F]`` float32; None if the encoder reads token ids.
    """

    token_ids: Tensor
    positions: Tensor
    starts: Tensor
    longest: int
    features: Tensor | None = None


class SourceEncoder(Decoder):
    """Encoder: embedding, blocks with bidirectional attention, and the final norm."""

    def embed_inputs(self, sources: EncoderInputBatch) -> torch.Tensor:
        """Compute the input of the first block, ``[E, H]``."""
        return self.embed(sources.token_ids, sources.positions)

    def encode(self, sources: EncoderInputBatch) -> torch.Tensor:
        """Compute the final normalised hidden states of encoder inputs, ``[E, H]``."""
        x = self.embed_inputs(sources)
        plan, residual = EncoderBatch(sources.starts, sources.longest), None
        for block, angles in zip(self.layers, self.angles(sources.positions), strict=True):
            x, residual = block(x, residual, *angles, None, plan, None)
        normalised: torch.Tensor = self.norm.forward_add(x, residual)[0]  # type: ignore[operator]
        return normalised


class CrossDecoder(Decoder):
    """Decoder with cross-attention, whose blocks cannot run without an encoder's output."""

    can_run_block_by_block = False


class EncoderDecoderLM(CausalLM):
    """Encoder, decoder and LM head; cross-attention caches keys and values of the encoder's output.

    Attributes:
        encoder: set by the subclass or the family that builds the model.
        feature_shape: (features M, frames F) of an encoder input; None if the encoder reads token
            ids.
    """

    decoder_type: ClassVar[type[Decoder]] = CrossDecoder
    encoder: SourceEncoder
    feature_shape: tuple[int, int] | None = None

    @property
    def max_source_tokens(self) -> int:
        """The largest number of tokens of an encoder input."""
        return self.encoder.config.max_position_embeddings

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute rotary angles for at least ``count`` positions of encoder and decoder."""
        super().reserve_positions(count, device)
        if not self.encoder.tables or count > len(self.encoder.tables[0][0]):
            self.encoder.reserve_positions(count, device)

    def encode(
        self, sources: EncoderInputBatch, caches: Sequence[Any], plans: Sequence[Any]
    ) -> None:
        """Run the encoder, and cache the keys and values of each cross-attention layer."""
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
