"""Self-attention variants that several model families share.

``ExpandedAttention`` computes latent attention of long prompts, with keys and values of every head
expanded from the cache. With absorbed projections, a pair of tokens costs C + R multiplications per
head for the score and C for the output. With expanded keys and values the pair costs D + R and V,
about a third in DeepSeek's models. But the keys and values of all cached tokens must be computed
first, which pays off only if many query tokens read the same cache.

``UnrotatedAttention`` and ``InterleavedAttention`` change the rotary embedding,
``SharedCacheAttention`` reads the cache of an earlier layer, and ``FusedAttention`` has one stored
tensor for the projections of queries, keys and values.

Dimensions: T tokens, U cached tokens that are read, B sequences, N heads, D head size (in latent
attention without the rotary part), R rotary size, C latent size, V size of a value head, P pages, S
page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, PluggableLayer, Site
from interposer_ops.attention import (
    merge_attention_states,
    ragged_attention,
    ragged_attention_with_lse,
)
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.projection_pairs import ProjectionNames, shard_attention
from interposer_ops.rotary import rotary_embedding_interleaved

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Expands latent vectors ``[U, C]`` to keys ``[U, N, D]`` and values ``[U, N, V]``."""

# Cached tokens whose keys and values are in memory at a time.
_CHUNK_TOKENS = 4096
# Shorter queries never pay off; for them the lengths are not read at all.
_MIN_QUERY_TOKENS = 256
# Multiplications of the absorbed form per multiplication of the expanded form. Measured on a CPU
# with DeepSeek-V2-Lite: a ratio of 1.3 (prompts of 512 tokens) speeds the step up by 1.06, a ratio
# of 1.9 (1,024 tokens) by 1.5.
_MIN_GAIN = 1.5
# No window, softcap, sinks or ALiBi slopes.
_MASKS = (None,) * 4


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """A range of cached positions of all sequences, attended to by all queries of a step.

    Attributes:
        slots: ``[U]`` int64.
        starts: ``[B + 1]`` int64; the keys of sequence b are ``slots[starts[b]:starts[b + 1]]``.
        longest: the most keys of a sequence.
    """

    slots: Tensor
    starts: Tensor
    longest: int


class ExpandedAttention:
    """Latent attention (MLA) with cached vectors expanded to keys and values of each head.

    Args:
        spec: the spec of the latent attention.
        plain: D.
        value: V.
    """

    def __init__(self, site: Site, spec: AttentionSpec, plain: int, value: int) -> None:
        heads, self.latent = spec.num_heads, spec.latent_size
        rotary = spec.head_size - spec.latent_size
        head_sizes = {"head_size": plain + rotary, "value_size": value}
        masks = dict.fromkeys(("windowed", "softcapped", "sinks", "alibi"), False)
        properties = {"num_heads": heads, "num_kv_heads": heads, **head_sizes, **masks}
        self._attend_prompt = site.bind(ragged_attention, **properties, causal=True)
        self._attend_new = site.bind(ragged_attention_with_lse, **properties, causal=True)
        self._attend_cached = site.bind(ragged_attention_with_lse, **properties, causal=False)
        self._merge = site.bind(merge_attention_states, num_heads=heads, value_size=value)
        self.scale = spec.scale
        # Multiplications per head.
        self._absorbed_pair_cost = 2 * self.latent + rotary
        self._expanded_pair_cost = plain + rotary + value
        self._expansion_cost = self.latent * (plain + value)  # per cached token

    def pays(self, batch: AttentionBatch) -> bool:
        """Say whether expanding the latent vectors saves multiplications for this batch.

        Reads only lengths in host memory, so that the device is never waited for.
        """
        if batch.max_query_tokens < _MIN_QUERY_TOKENS:
            return False
        # Lengths are on the device only; reading them would stall the step.
        if batch.host is None and batch.slots.device.type != "cpu":
            return False
        pairs = tokens = 0
        for count, seq_tokens in _lengths(batch):
            # New tokens attend to all cached tokens and, causally, to each other.
            pairs += count * (seq_tokens - count) + count * (count + 1) // 2
            tokens += seq_tokens
        absorbed = pairs * self._absorbed_pair_cost
        expanded = pairs * self._expanded_pair_cost + tokens * self._expansion_cost
        return absorbed >= _MIN_GAIN * expanded

    def __call__(
        self, query: Tensor, vectors: Tensor, expand: Expand, cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Attend to new and cached tokens; return ``[T, N, V]``.

        Args:
            query: ``[T, N, D + R]``.
            vectors: ``[T, 1, C + R]`` of the same tokens, already written to the cache.
            cache: ``[P, S, C + R]``.
        """
        starts, longest = batch.query_starts, batch.max_query_tokens

        def attend(
            op: Any, vectors: Tensor, key_starts: Tensor, longest_key: int, causal: bool
        ) -> Any:
            lengths = starts, key_starts, longest, longest_key
            return op(query, *self._keys(vectors, expand), *lengths, self.scale, causal, *_MASKS)

        # New tokens first, causally; then cached tokens, chunk by chunk, without a mask. Partial
        # results are merged by their log-sum-exp.
        chunks = cached_chunks(batch, cache.shape[1])
        if not chunks:
            return attend(self._attend_prompt, vectors[:, 0], starts, longest, True)  # type: ignore[no-any-return]
        out, lse = attend(self._attend_new, vectors[:, 0], starts, longest, True)
        flat_cache = cache.flatten(0, 1)
        for chunk in chunks:
            partial = attend(
                self._attend_cached, flat_cache[chunk.slots], chunk.starts, chunk.longest, False
            )
            out, lse = self._merge(out, lse, *partial)
        return out  # type: ignore[no-any-return]

    def _keys(self, vectors: Tensor, expand: Expand) -> tuple[Tensor, Tensor]:
        """Expand vectors ``[U, C + R]`` to keys ``[U, N, D + R]`` and values ``[U, N, V]``."""
        keys, values = expand(vectors[:, : self.latent].contiguous())
        rotated = vectors[:, None, self.latent :].expand(-1, keys.shape[1], -1)
        return torch.cat((keys, rotated), -1), values


def cached_chunks(batch: AttentionBatch, page_size: int) -> list[CachedChunk]:
    """Split the tokens cached before a step into chunks of consecutive positions."""
    cached_counts = [seq_tokens - count for count, seq_tokens in _lengths(batch)]
    table, device = batch.on_host().page_table, batch.slots.device
    # All sequences together have about _CHUNK_TOKENS keys at a time.
    chunk_tokens = max(page_size, _CHUNK_TOKENS // len(cached_counts))
    chunks = []
    for chunk_start in range(0, max(cached_counts), chunk_tokens):
        slots, starts = [], [0]
        for pages, count in zip(table, cached_counts, strict=True):
            # Empty for a sequence that ends before this chunk.
            positions = torch.arange(
                chunk_start, max(chunk_start, min(count, chunk_start + chunk_tokens))
            )
            slots.append(pages[positions // page_size] * page_size + positions % page_size)
            starts.append(starts[-1] + len(positions))
        longest = max(stop - start for start, stop in pairwise(starts))
        slot_tensor = torch.cat(slots).to(device)
        chunks.append(CachedChunk(slot_tensor, torch.tensor(starts, device=device), longest))
    return chunks


def _lengths(batch: AttentionBatch) -> list[tuple[int, int]]:
    """Return the numbers of new tokens and of all tokens of each sequence, in pairs."""
    host = batch.on_host()
    return list(zip(host.query_starts.diff().tolist(), host.seq_lens.tolist(), strict=True))


class Unrotated(RotaryEmbedding):
    """Rotary layer that returns queries and keys unchanged (NoPE)."""

    def __init__(self, site: Site, head_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return query, key


class UnrotatedAttention(SelfAttention):
    """Self-attention without rotary embedding (NoPE); only the causal mask depends on positions."""

    rotary_type = Unrotated


class InterleavedRotary(RotaryEmbedding):
    """Rotary embedding of adjacent elements (2i, 2i + 1), not of the two halves of a head."""

    def __init__(self, site: Site, head_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)
        # Skips RotaryEmbedding.__init__, which would bind the kernel that rotates halves.
        sizes = {"head_size": head_size, "rotary_size": rotary_size}
        self.rotate = site.bind(rotary_embedding_interleaved, **sizes)


class InterleavedAttention(SelfAttention):
    """Self-attention with ``InterleavedRotary``."""

    rotary_type = InterleavedRotary


class SharedCacheAttention(PluggableLayer):
    """Attention over the KV cache of an earlier layer with an equal spec; caches nothing itself."""

    def __init__(self, site: Site, spec: AttentionSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.backend: AttentionBackend = site.resolver.attention(spec, site)
        # In a tuple, so that torch does not register it as a submodule.
        self.cache_writer: tuple[Attention, ...] = ()

    def forward(self, query: Tensor, cache: Tensor, plan: object) -> Tensor:
        """Attend to the earlier layer's KV cache; return ``[T, N, D]``.

        Args:
            plan: the backend's plan of this step.
        """
        return self.cache_writer[0].read(query, cache, plan)


def connect_cache_readers(modules: Iterable[nn.Module]) -> None:
    """Connect each layer that reads another layer's KV cache to the layer that writes it.

    Args:
        modules: the modules of a decoder, in layer order.
    """
    last_writers: dict[AttentionBackend, Attention] = {}
    for module in modules:
        if isinstance(module, Attention):
            last_writers[module.backend] = module
        elif isinstance(module, SharedCacheAttention):
            module.cache_writer = (last_writers[module.backend],)


@dataclass(frozen=True)
class FusedForm:
    """Layout of a fused QKV projection in checkpoints: names, layer class, and order of the rows.

    Attributes:
        names: names of the QKV projection and of the output projection.
        linear: the layer class of both projections.
        rotary_size: rotated elements of a head; 0 without rotary embedding.
        by_head: the rows are grouped by head (q0 k0 v0 q1 ...), not by kind (q0 q1 ... k0 ...).
    """

    names: tuple[str, str]
    bias: bool
    linear: type[Linear] = Linear
    rotary_size: int = 0
    by_head: bool = False


class FusedAttention(SelfAttention):
    """Multi-head self-attention with as many kv heads as query heads, and one QKV projection."""

    def __init__(self, site: Site, spec: AttentionSpec, hidden_size: int, form: FusedForm) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        names = ProjectionNames(*form.names, form.bias, form.bias)
        # Sharding must know the order of the rows: three values per head, or three blocks of heads.
        axes = (("query", 3),) if form.by_head else (("query", 1),) * 3
        outputs = {form.names[0].rpartition(".")[2]: axes}
        shards = shard_attention(site, spec, hidden_size, names, outputs, form.linear)
        self.sizes, self.by_head = shards.sizes, form.by_head
        self.qkv_proj, self.o_proj = shards.first(), shards.last()
        self.q_norm = self.k_norm = None
        rotary = RotaryEmbedding if form.rotary_size else Unrotated
        self.rotary = rotary(site.at("rotary"), size, form.rotary_size)
        self.attn = shards.attention(site.at("attn"))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value ``[T, N, D]`` from the hidden states."""
        if not self.by_head:
            return super().heads(x, cos, sin)
        merged = self.qkv_proj(x).unflatten(-1, (-1, 3, self.head_size))
        # Kernels take contiguous tensors; unbind returns strided views.
        query, key, value = (part.contiguous() for part in merged.unbind(-2))
        return (*self.rotary(query, key, cos, sin), value)
