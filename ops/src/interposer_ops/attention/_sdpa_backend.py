"""Attention of decoders and to sources through torch's scaled dot products.

It copies what is read of the cache, as much as the host knows of a step, so that it is no match
for kernels that read pages where they lie; it serves where these cannot be had. Platforms offer it
by records of their own. Results are tested on the processor; on an accelerator it was not run.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, P pages,
S page size, L cached tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Verdict,
)
from interposer_ops.attention._source_attention import judge_source, lone_queries

Pair = tuple[Tensor, Tensor]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Several tokens of one sequence, in consecutive rows.

    Attributes:
        slots: ``[L]`` int64, of the cache, that are read; None where the tokens of this step are
            all that there is and each sees those before it.
        seen: ``[T, L]`` bool; None where ``slots`` is.
    """

    rows: slice
    slots: Tensor | None
    seen: Tensor | None


@dataclass(frozen=True, slots=True)
class Decodes:
    """One token each of several sequences.

    Attributes:
        rows: ``[B]`` int64.
        slots: ``[B, L]`` int64; beyond what a sequence sees, slots that it does see.
        seen: ``[B, L]`` bool.
    """

    rows: Tensor
    slots: Tensor
    seen: Tensor


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """The slots ``[T]`` int64 to write to, and what to compute."""

    slots: Tensor
    parts: tuple[Prompt | Decodes, ...]


class SdpaBackend(AttentionBackend):
    """Whole prompts attend to the step's own keys, everything else to copies from the cache."""

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders, and sources, with a plain cache and plain scores."""
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 32 or 16 bit floats, got {spec.dtype}")
        if spec.softcap is not None:
            return Verdict.refuse(f"does not cap scores, softcap is {spec.softcap}")
        is_source = spec.type == "encoder_decoder"
        return judge_source(spec) if is_source else spec.judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Return slots and masks, on the device, made of the lengths on the host."""
        if self.spec.type == "encoder_decoder":
            batch = lone_queries(batch)
        host = batch.on_host()
        starts, lengths = host.query_starts.tolist(), host.seq_lens.tolist()
        parts: list[Prompt | Decodes] = []
        single = []
        for index, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
            if end - start > 1:
                parts.append(_prompt(batch, self.spec, index, slice(start, end), length))
            elif end > start:
                single.append((start, index, length))
        if single:
            parts.append(_decodes(batch, self.spec, single))
        return SdpaPlan(batch.slots, tuple(parts))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: SdpaPlan
    ) -> Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        keys, values = cache.flatten(1, 2).unbind(0)  # each [P S, K, D]
        keys[plan.slots] = key
        values[plan.slots] = value
        return self._attend(query, (key, value), (keys, values), plan)

    def forward_stored(
        self,
        query: Tensor,
        cache: Tensor,
        plan: SdpaPlan,
        scales: Any = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend to a source; see ``AttentionBackend.forward_stored``."""
        keys, values = cache.flatten(1, 2).unbind(0)
        own = query, query  # is not read, as every part reads the cache
        return self._attend(query, own, (keys, values), plan)

    def _attend(self, query: Tensor, own: Pair, stored: Pair, plan: SdpaPlan) -> Tensor:
        """Return ``[T, N, D]`` of the keys and values of the step, and of those in the cache."""
        (key, value), (keys, values) = own, stored
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for part in plan.parts:
            if isinstance(part, Decodes):
                out[part.rows] = self._decode(query[part.rows], keys, values, part)
            elif part.slots is None:
                rows = part.rows
                out[rows] = self._prompt(query[rows], key[rows], value[rows])
            else:
                out[part.rows] = self._chunk(query[part.rows], keys, values, part)
        return out

    def _prompt(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention of ``[T, N, D]`` to the tokens before each."""
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.spec.scale, enable_gqa=True
        )
        rows: Tensor = out[0].transpose(0, 1)
        return rows

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, part: Prompt) -> Tensor:
        """Return attention of ``[T, N, D]`` to slots of the cache.

        The heads of a group are rows of one product: with a mask, torch's memory-efficient kernel
        takes no groups.
        """
        assert part.slots is not None
        assert part.seen is not None
        own_keys, own_values = (t[part.slots].transpose(0, 1)[None] for t in (keys, values))
        folded = query.unflatten(1, (self.spec.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        mask = part.seen.repeat(query.shape[1] // self.spec.num_kv_heads, 1)  # [G T, L]
        out = functional.scaled_dot_product_attention(
            folded[None], own_keys, own_values, attn_mask=mask, scale=self.spec.scale
        )
        heads: Tensor = out[0].unflatten(1, (-1, len(query))).flatten(0, 1)
        return heads.transpose(0, 1)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, part: Decodes) -> Tensor:
        """Return attention of one query ``[B, N, D]`` each; a group's heads are rows."""
        # Each [B, K, L, D].
        own_keys, own_values = (t[part.slots].transpose(1, 2) for t in (keys, values))
        folded = query.unflatten(1, (self.spec.num_kv_heads, -1))  # [B, K, G, D]
        out = functional.scaled_dot_product_attention(
            folded, own_keys, own_values, attn_mask=part.seen[:, None, None], scale=self.spec.scale
        )
        return out.flatten(1, 2)


def _prompt(
    batch: AttentionBatch, spec: AttentionSpec, index: int, rows: slice, length: int
) -> Prompt:
    window = spec.window_tokens or length
    before = length - (rows.stop - rows.start)
    if before == 0 and window >= length:
        return Prompt(rows, None, None)
    device = batch.slots.device
    places = torch.arange(max(before - window + 1, 0), length, device=device)
    distance = torch.arange(before, length, device=device)[:, None] - places
    slots = _slots(batch.page_table[index][None], places[None], spec.page_size)[0]
    return Prompt(rows, slots, (distance >= 0) & (distance < window))


def _decodes(
    batch: AttentionBatch, spec: AttentionSpec, members: list[tuple[int, int, int]]
) -> Decodes:
    device = batch.slots.device
    rows, indices, lengths = torch.tensor(members, device=device).unbind(1)
    window = spec.window_tokens or batch.max_seq_tokens
    width = min(max(length for _, _, length in members), window)
    first = (lengths - window).clamp(min=0)
    places = first[:, None] + torch.arange(width, device=device)  # [B, L]
    seen = places < lengths[:, None]
    # What a sequence does not have is its last token once more: nothing foreign is read, and
    # nothing that was never written, whose NaN a weight of zero does not silence.
    own = places.minimum(lengths[:, None] - 1)
    return Decodes(rows, _slots(batch.page_table[indices], own, spec.page_size), seen)


def _slots(page_table: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Return the slots of ``places`` ``[B, L]`` in sequences with ``page_table`` ``[B, P]``."""
    return page_table.gather(1, places // page_size) * page_size + places % page_size
