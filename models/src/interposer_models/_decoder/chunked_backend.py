"""Chunked attention: tokens see what is before them in their own chunk of the sequence.

Every chunk is told to a plain backend as a sequence of its own, whose first page is that of the
chunk. So whatever serves causal attention over pages serves chunks, in the same kernels.
Dimensions: T tokens, B sequences, V chunks that hold new tokens, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Verdict,
)
from interposer.errors import ConfigError
from interposer_ops.layers.attention import Attention


@dataclass(frozen=True)
class FixedPlan:
    """A plan for a graph, and the batch of chunks that it was made of."""

    plan: Any
    chunks: AttentionBatch


class ChunkedBackend(AttentionBackend):
    """The plain ``inner`` backend, for chunks of so many tokens.

    Raises: ConfigError: a chunk is not a whole number of pages.
    """

    def __init__(self, inner: AttentionBackend, chunk_tokens: int) -> None:
        self.spec, self.inner, self.chunk_tokens = inner.spec, inner, chunk_tokens
        self.plans_on_host = inner.plans_on_host  # type: ignore[misc]
        size = self.spec.page_size
        if chunk_tokens % size:
            raise ConfigError(
                f"chunks of {chunk_tokens} tokens do not begin with a page, which has {size} in "
                f"{type(inner).__name__}. Try: Config(attention=...) with a backend of smaller "
                "pages"
            )

    @property
    def seen_tokens(self) -> int:
        """The tokens of a chunk."""
        return self.chunk_tokens

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Refuse: it is made of a backend that was chosen, and is not chosen itself."""
        return Verdict.refuse("is made of another backend")

    def kv_layout(self) -> KVCacheLayout:
        """Return the layout of the inner backend."""
        return self.inner.kv_layout()

    def plan(self, batch: AttentionBatch) -> Any:
        """Return the inner backend's plan of the chunks."""
        return self.inner.plan(self._chunks(batch))

    def plan_fixed(self, batch: AttentionBatch) -> FixedPlan:
        """Return a plan for a graph; see ``AttentionBackend.plan_fixed``."""
        chunks = self._chunks(batch)
        return FixedPlan(self.inner.plan_fixed(chunks), chunks)

    def update_plan(self, plan: FixedPlan, batch: AttentionBatch) -> None:
        """Write the chunks of ``batch`` where the graph reads them."""
        held, fresh = plan.chunks, self._chunks(batch)
        pairs = [(held, fresh)]
        if held.host is not None and fresh.host is not None:
            pairs.append((held.host, fresh.host))
        for target, source in pairs:
            for field in fields(AttentionBatch):
                value = getattr(target, field.name)
                if isinstance(value, Tensor):
                    value.copy_(getattr(source, field.name))
        self.inner.update_plan(plan.plan, held)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        return self.inner.forward(query, key, value, cache, _plan(plan))

    def prepare_scales(self, key_scale: Tensor, value_scale: Tensor) -> Any:
        """Return what the inner backend wants."""
        return self.inner.prepare_scales(key_scale, value_scale)

    def forward_quantized(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any, scales: Any
    ) -> Tensor:
        """Do the same over a cache of another dtype."""
        return self.inner.forward_quantized(query, key, value, cache, _plan(plan), scales)

    def _chunks(self, batch: AttentionBatch) -> AttentionBatch:
        return chunks_of(batch, self.chunk_tokens, self.spec.page_size)


def chunk_layers(layers: Iterable[Attention], chunk_tokens: int) -> None:
    """Let the layers see no more than their chunks; those that share a backend share a plan."""
    made: dict[AttentionBackend, ChunkedBackend] = {}
    for layer in layers:
        inner = layer.backend
        layer.backend = made.setdefault(inner, ChunkedBackend(inner, chunk_tokens))


def chunks_of(batch: AttentionBatch, chunk_tokens: int, page_size: int) -> AttentionBatch:
    """Return the chunks with new tokens as sequences, ``[V]``, in the order of their tokens.

    Where every sequence has one new token, nothing depends on values of the batch.
    """
    if batch.max_query_tokens == 1:
        newest = _newest(batch, chunk_tokens, page_size)
        host = None if batch.host is None else _newest(batch.host, chunk_tokens, page_size)
        return replace(newest, host=host)
    split = _split(batch.on_host(), chunk_tokens, page_size)
    device = batch.slots.device
    if device.type == "cpu":
        return split
    names = ("query_starts", "seq_lens", "page_table")
    moved = {name: getattr(split, name).to(device, non_blocking=True) for name in names}
    return replace(split, **moved, slots=batch.slots, host=split)


def _newest(batch: AttentionBatch, chunk_tokens: int, page_size: int) -> AttentionBatch:
    """Return the last chunk of each sequence."""
    firsts = (batch.seq_lens - 1).clamp(min=0) // chunk_tokens * chunk_tokens
    return replace(
        batch,
        seq_lens=batch.seq_lens - firsts,
        page_table=_pages(batch.page_table, firsts, chunk_tokens, page_size),
        max_seq_tokens=min(chunk_tokens, batch.max_seq_tokens),
        host=None,
    )


def _split(batch: AttentionBatch, chunk_tokens: int, page_size: int) -> AttentionBatch:
    """Return every chunk with new tokens, of a batch in host memory."""
    rows, firsts, ends, counts = list[int](), list[int](), list[int](), list[int]()
    starts = batch.query_starts.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        position = length - (starts[row + 1] - starts[row])
        while position < length:
            first = position // chunk_tokens * chunk_tokens
            end = min(first + chunk_tokens, length)
            rows.append(row)
            firsts.append(first)
            ends.append(end)
            counts.append(end - position)
            position = end
    first_tokens = torch.tensor(firsts, dtype=torch.int64)
    lengths = torch.tensor(ends, dtype=torch.int64) - first_tokens
    return replace(
        batch,
        query_starts=torch.tensor([0, *counts], dtype=torch.int64).cumsum(0),
        seq_lens=lengths,
        page_table=_pages(batch.page_table[rows], first_tokens, chunk_tokens, page_size),
        max_query_tokens=max(counts),
        max_seq_tokens=int(lengths.max()),
        host=None,
    )


def _pages(table: Tensor, firsts: Tensor, chunk_tokens: int, page_size: int) -> Tensor:
    """Return the pages of chunks ``[V, pages of a chunk]`` that begin at ``firsts`` ``[V]``."""
    width = table.shape[1]
    count = min(chunk_tokens // page_size, width)
    columns = (firsts // page_size)[:, None] + torch.arange(count, device=table.device)
    return table.gather(1, columns.clamp(max=width - 1))


def _plan(plan: Any) -> Any:
    return plan.plan if isinstance(plan, FixedPlan) else plan
