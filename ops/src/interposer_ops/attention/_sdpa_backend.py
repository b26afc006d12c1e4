"""Attention through torch's SDPA, for decoders and for cross attention to encoder inputs.

Cached tokens are copied before each call, so kernels that read pages in place are faster; this
backend serves where such kernels do not exist. Platforms offer the backend by records of their own.
Results are tested on the CPU; the backend was never run on an accelerator.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, P pages, S page
size, L cached tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
    """An attention call for several tokens of one sequence, in consecutive rows.

    Attributes:
        slots: ``[L]`` int64, cache slots to read; None if this step's tokens are the whole
            sequence, under a plain causal mask.
        visible: ``[T, L]`` bool, visible keys of each token; None if ``slots`` is None.
    """

    rows: slice
    slots: Tensor | None
    visible: Tensor | None


@dataclass(frozen=True, slots=True)
class Decodes:
    """An attention call for one token of each of several sequences.

    Attributes:
        rows: ``[B]`` int64.
        slots: ``[B, L]`` int64; padded with slots that the sequence sees anyway.
        visible: ``[B, L]`` bool.
    """

    rows: Tensor
    slots: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """The slots ``[T]`` int64 to write, and the attention calls of the step."""

    slots: Tensor
    parts: tuple[Prompt | Decodes, ...]


class SdpaBackend(AttentionBackend):
    """Attention backend on SDPA: complete prompts use the step's keys, others gather the cache."""

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders and cross attention with an unquantized cache and without softcap."""
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 32 or 16 bit floats, got {spec.dtype}")
        if spec.softcap is not None:
            return Verdict.refuse(f"does not cap scores, softcap is {spec.softcap}")
        is_source = spec.type == "encoder_decoder"
        return judge_source(spec) if is_source else spec.judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Describe the cache of one layer, ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Plan a step: slots and masks on the device, computed from the lengths on the host."""
        if self.spec.type == "encoder_decoder":
            batch = lone_queries(batch)
        host = batch.on_host()
        starts, lengths = host.query_starts.tolist(), host.seq_lens.tolist()
        parts: list[Prompt | Decodes] = []
        single_tokens = []
        for index, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
            if end - start > 1:
                parts.append(_prompt(batch, self.spec, index, slice(start, end), length))
            elif end > start:
                single_tokens.append((start, index, length))
        if single_tokens:
            parts.append(_decodes(batch, self.spec, single_tokens))
        return SdpaPlan(batch.slots, tuple(parts))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        plan: SdpaPlan,
        *,
        stored: bool = False,
    ) -> Tensor:
        """Store the step's keys and values, then compute attention ``[T, N, D]``."""
        keys, values = cache.flatten(1, 2).unbind(0)  # each [P S, K, D]
        # Written first: chunks and decode steps read this step's own tokens from the cache.
        if not stored:
            keys[plan.slots] = key
            values[plan.slots] = value
        return self._attend(query, (key, value), (keys, values), plan)

    def _attend(self, query: Tensor, new: Pair, stored: Pair, plan: SdpaPlan) -> Tensor:
        """Compute ``[T, N, D]`` from this step's (keys, values) and the cached (keys, values)."""
        (key, value), (keys, values) = new, stored
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
        """Compute causal attention of the queries ``[T, N, D]`` of one complete prompt."""
        # is_causal aligns the mask at the first key, so this call suits only whole prompts.
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.spec.scale, enable_gqa=True
        )
        rows: Tensor = out[0].transpose(0, 1)
        return rows

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, part: Prompt) -> Tensor:
        """Compute attention of the queries ``[T, N, D]`` to the keys and values in cache slots.

        The heads of a GQA group become rows of one matmul: with a mask, torch's memory-efficient
        kernel does not support GQA.
        """
        assert part.slots is not None
        assert part.visible is not None
        cached_keys, cached_values = (t[part.slots].transpose(0, 1)[None] for t in (keys, values))
        folded = query.unflatten(1, (self.spec.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        mask = part.visible.repeat(query.shape[1] // self.spec.num_kv_heads, 1)  # [G T, L]
        out = functional.scaled_dot_product_attention(
            folded[None], cached_keys, cached_values, attn_mask=mask, scale=self.spec.scale
        )
        heads: Tensor = out[0].unflatten(1, (-1, len(query))).flatten(0, 1)
        return heads.transpose(0, 1)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, part: Decodes) -> Tensor:
        """Compute attention of one query per sequence, ``[B, N, D]``; a group's heads are rows."""
        # Each [B, K, L, D].
        cached_keys, cached_values = (t[part.slots].transpose(1, 2) for t in (keys, values))
        folded = query.unflatten(1, (self.spec.num_kv_heads, -1))  # [B, K, G, D]
        out = functional.scaled_dot_product_attention(
            folded,
            cached_keys,
            cached_values,
            attn_mask=part.visible[:, None, None],
            scale=self.spec.scale,
        )
        return out.flatten(1, 2)


def _prompt(
    batch: AttentionBatch, spec: AttentionSpec, index: int, rows: slice, length: int
) -> Prompt:
    window = spec.window_tokens or length
    num_earlier = length - (rows.stop - rows.start)
    if num_earlier == 0 and window >= length:
        return Prompt(rows, None, None)
    device = batch.slots.device
    key_positions = torch.arange(max(num_earlier - window + 1, 0), length, device=device)
    distance = torch.arange(num_earlier, length, device=device)[:, None] - key_positions
    slots = _slots(batch.page_table[index][None], key_positions[None], spec.page_size)[0]
    return Prompt(rows, slots, (distance >= 0) & (distance < window))


def _decodes(
    batch: AttentionBatch, spec: AttentionSpec, members: list[tuple[int, int, int]]
) -> Decodes:
    device = batch.slots.device
    rows, indices, lengths = torch.tensor(members, device=device).unbind(1)
    window = spec.window_tokens or batch.max_seq_tokens
    width = min(max(length for _, _, length in members), window)
    first = (lengths - window).clamp(min=0)
    key_positions = first[:, None] + torch.arange(width, device=device)  # [B, L]
    visible = key_positions < lengths[:, None]
    # Positions after the end repeat the last token. Slots of others or never written may hold NaN,
    # and a masked NaN times a weight of zero would still be NaN.
    read_positions = key_positions.minimum(lengths[:, None] - 1)
    slots = _slots(batch.page_table[indices], read_positions, spec.page_size)
    return Decodes(rows, slots, visible)


def _slots(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return the cache slots of ``positions`` ``[B, L]``, for a ``page_table`` ``[B, P]``."""
    return page_table.gather(1, positions // page_size) * page_size + positions % page_size
