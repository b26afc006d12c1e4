"""Decoder attention through torch's fused kernel for scaled dot products.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, P pages,
S page size, L cached tokens that are read.
"""

from __future__ import annotations

import torch
from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from torch.nn import functional

from interposer_cpu.attention_plan import Decodes, Plan, Prefill, Span, make_plan

__all__ = ["SdpaBackend"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SdpaBackend(AttentionBackend):
    """Attend to views of the cache where pages follow each other, to gathered pages elsewhere."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._group = spec.num_heads // spec.num_kv_heads
        # With one query row per kv head, torch's kernel multiplies matrices by vectors, which
        # takes twice as long in 16 bits as the same product for two rows.
        self._doubled = self._group == 1 and spec.dtype.itemsize == 2

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders with a plain cache and plain scores."""
        if spec.type != "decoder":
            return Verdict.refuse(f"serves decoder attention only, got {spec.type}")
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 32 or 16 bit floats, got {spec.dtype}")
        if spec.cache_dtype != spec.dtype:
            return Verdict.refuse(f"stores the cache as {spec.dtype}, asked for {spec.cache_dtype}")
        if spec.num_heads % spec.num_kv_heads:
            heads = f"{spec.num_heads} heads, {spec.num_kv_heads} kv heads"
            return Verdict.refuse(f"needs heads in groups of one size, got {heads}")
        if spec.softcap is not None:
            return Verdict.refuse(f"does not cap scores, softcap is {spec.softcap}")
        for feature in ("sinks", "latent", "sparse", "prefix_lm"):
            if getattr(spec, feature):
                return Verdict.refuse(f"does not do {feature}")
        return Verdict.accept()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, K, P, S, D]``: what one kv head reads lies together."""
        spec = self.spec
        page_shape = (2, spec.num_kv_heads, spec.page_size, spec.head_size)
        return KVCacheLayout(page_shape, 2, (0, 1, 2, 3, 4), spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Return slices, masks and page lists, on the host."""
        return make_plan(batch, self.spec)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        spec = self.spec
        slots = cache.view(2, 1, spec.num_kv_heads, -1, spec.head_size)  # [2, 1, K, P S, D]
        _write(slots, key, value, plan)
        if len(plan.parts) == 1 and isinstance(plan.parts[0], Prefill):
            return self._prefill(query, key, value, slots, plan.parts[0])
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for part in plan.parts:
            if isinstance(part, Decodes):
                out[part.rows] = self._decodes(query[part.rows], cache, part)
            else:
                rows = slice(part.start_row, part.start_row + part.num_rows)
                own = query[rows], key[rows], value[rows]
                out[rows] = self._prefill(*own, slots, part)
        return out

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        part: Prefill,
    ) -> torch.Tensor:
        if part.num_rows == 1:
            keys, values = _read(slots, part.span)
            return self._attend_one(query, keys, values, None)
        if part.causal and part.span.pages is not None:
            keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        else:
            keys, values = _read(slots, part.span)
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=part.mask,
            is_causal=part.causal,
            scale=self.spec.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)  # contiguous: the kernel returns tokens before heads

    def _decodes(self, query: torch.Tensor, cache: torch.Tensor, part: Decodes) -> torch.Tensor:
        spec = self.spec
        batch = part.rows.shape[0]
        pages = cache.index_select(2, part.pages)
        gathered = pages.view(2, spec.num_kv_heads, -1, spec.head_size)
        if part.hidden is not None:  # a weight of zero does not silence a NaN
            gathered.index_fill_(2, part.hidden, 0)
        keys, values = gathered.unflatten(2, (batch, -1)).transpose(1, 2).unbind(0)
        return self._attend_one(query, keys, values, part.mask)

    def _attend_one(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return attention of one query ``[B, N, D]`` each over ``[B, K, L, D]``.

        The heads of a group are rows of one product, so that its keys are read once.
        """
        folded = query.reshape(-1, self.spec.num_kv_heads, self._group, self.spec.head_size)
        if self._doubled:
            folded = folded.expand(-1, -1, 2, -1)
        out = functional.scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=self.spec.scale
        )
        if self._doubled:
            out = out[:, :, :1]
        return out.reshape(query.shape)


def _write(slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan) -> None:
    if plan.first_slot is not None and key.shape[0] == 1:
        torch.stack((key, value), out=slots.select(3, plan.first_slot))
        return
    pair = key.transpose(0, 1), value.transpose(0, 1)  # each [K, T, D]
    rows = slots.squeeze(1)
    if plan.first_slot is not None:
        torch.stack(pair, out=rows.narrow(2, plan.first_slot, key.shape[0]))
    else:
        rows.index_copy_(2, plan.slots, torch.stack(pair))


def _read(slots: torch.Tensor, span: Span) -> tuple[torch.Tensor, ...]:
    """Return keys and values, each ``[1, K, L, D]``."""
    if span.pages is None:
        return slots.narrow(3, span.start, span.num_tokens).unbind(0)
    raise NotImplementedError
