"""Decoder attention with torch's fused ``scaled_dot_product_attention`` (SDPA).

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, P pages,
S page size, L cached tokens that are read.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from interposer_cpu._attention_plan import Decode, Decodes, Plan, Prompt, Span, make_plan

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SdpaBackend(AttentionBackend):
    """SDPA over a paged cache: reads consecutive pages as views and gathers all others."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._group = spec.num_heads // spec.num_kv_heads
        # With one query row per kv head, torch's kernel computes GEMVs, which in 16 bits take
        # twice as long as a GEMM of two rows. So the row is computed twice.
        self._doubled = self._group == 1 and spec.dtype.itemsize == 2

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders with an unquantized cache, without softcap, ALiBi and sinks."""
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 32 or 16 bit floats, got {spec.dtype}")
        if spec.softcap is not None:
            return Verdict.refuse(f"does not cap scores, softcap is {spec.softcap}")
        return spec.judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Define the layout ``[2, K, P, S, D]``: all keys of one kv head are adjacent."""
        spec = self.spec
        page_shape = (2, spec.num_kv_heads, spec.page_size, spec.head_size)
        return KVCacheLayout(page_shape, 2, (0, 1, 2, 3, 4), spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Compute slices, masks and page lists of a step, on the host."""
        return make_plan(batch, self.spec)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        """Store the step's keys and values, then compute attention ``[T, N, D]``."""
        _write(cache, key, value, plan)
        if len(plan.parts) == 1:
            return self._attend(query, key, value, cache, plan.parts[0])
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for part in plan.parts:
            rows = part.rows
            out[rows] = self._attend(query[rows], key[rows], value[rows], cache, part)
        return out

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        part: Prompt | Decode | Decodes,
    ) -> torch.Tensor:
        if isinstance(part, Decode):
            return self._single_rows(query, *_read(cache, part.span), None)
        if isinstance(part, Decodes):
            return self._single_rows(query, *_gather(cache, part), part.mask)
        if part.causal:
            count = part.num_sequences
            keys, values = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in (key, value))
        else:
            keys, values = _read(cache, part.span)
        if part.folded is not None:
            return self._attend_by_gemms(query, keys, values, part.folded)
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=part.mask,
            is_causal=part.causal,
            scale=self.spec.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)  # contiguous, as the kernel returns tokens before heads

    def _attend_by_gemms(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Compute attention of ``[B T, N, D]`` to ``[B, K, L, D]`` by two GEMMs, float32 scores."""
        rows = query.unflatten(0, (keys.shape[0], -1)).transpose(1, 2)  # [B, N, T, D]
        wide = keys.float().flatten(0, 1).transpose(1, 2)  # [B K, D, L]
        folded = rows.float().reshape(len(wide), -1, query.shape[-1])  # [B K, G T, D]
        scores = torch.baddbmm(mask, folded, wide, alpha=self.spec.scale)
        out = torch.bmm(scores.softmax(-1).to(values.dtype), values.flatten(0, 1))
        return out.view(rows.shape).transpose(1, 2).reshape(query.shape)

    def _single_rows(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention of one query per sequence, ``[B, N, D]``, to ``[B, K, L, D]``.

        The query heads of a group are rows of one GEMM, so that keys are read once per group.
        """
        folded = query.reshape(-1, self.spec.num_kv_heads, self._group, self.spec.head_size)
        if self._doubled:  # see __init__
            folded = folded.expand(-1, -1, 2, -1)
        out = functional.scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=self.spec.scale
        )
        if self._doubled:
            out = out[:, :, :1]
        return out.reshape(query.shape)


def _write(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan) -> None:
    slots = cache.flatten(2, 3)  # [2, K, P S, D]
    # Consecutive slots are written in place, without an index and, for one token, without a copy.
    if plan.first_slot is None:
        pair = key.transpose(0, 1), value.transpose(0, 1)  # each [K, T, D]
        slots.index_copy_(2, plan.slots, torch.stack(pair))
    elif key.shape[0] == 1:
        torch.cat((key, value), out=slots.select(2, plan.first_slot))
    else:
        pair = key.transpose(0, 1), value.transpose(0, 1)
        torch.stack(pair, out=slots.narrow(2, plan.first_slot, key.shape[0]))


def _read(cache: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the keys and values of ``span``, ``[1, K, L, D]`` each."""
    if span.pages is not None:
        cache = cache.index_select(2, span.pages)
    tokens = cache.flatten(2, 3).narrow(2, span.start, span.num_tokens)
    keys, values = tokens.unsqueeze(1).unbind(0)
    return keys, values


def _gather(cache: torch.Tensor, part: Decodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values of all sequences, ``[B, K, P S, D]`` each."""
    gathered = cache.index_select(2, part.pages).flatten(2, 3)
    if part.hidden is not None:  # an attention weight of zero times NaN is still NaN
        gathered.index_fill_(2, part.hidden, 0)
    keys, values = gathered.unflatten(2, (part.num_sequences, -1)).transpose(1, 2).unbind(0)
    return keys, values
