"""Chunked attention: a token attends only to earlier tokens of its own chunk of the sequence.

The backend passes every chunk to a plain backend as a separate sequence, with a page table that
begins at the chunk's first page. So every backend for causal attention over pages also serves
chunks, with the same kernels.
Dimensions: T tokens, B sequences, V chunks that contain new tokens, P pages, S page size.
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
    """Plan of the inner backend for a captured graph, and the batch of chunks in that plan."""

    plan: Any
    chunks: AttentionBatch


class ChunkedBackend(AttentionBackend):
    """Attention backend that applies the backend ``inner`` to chunks of ``chunk_tokens`` tokens.

    Raises: ConfigError: the chunk length is not a multiple of the page size.
    """

    def __init__(self, inner: AttentionBackend, chunk_tokens: int) -> None:
        self.spec, self.inner, self.chunk_tokens = inner.spec, inner, chunk_tokens
        # A class attribute of AttentionBackend; here it depends on the wrapped backend.
        self.plans_on_host = inner.plans_on_host  # type: ignore[misc]
        page_size = self.spec.page_size
        if chunk_tokens % page_size:
            raise ConfigError(
                f"the attention chunk of {chunk_tokens} tokens is not a multiple of the page size "
                f"{page_size} of {type(inner).__name__}. Try: Config(attention=...) with a backend "
                "of smaller pages"
            )

    @property
    def seen_tokens(self) -> int:
        """The largest number of tokens that a token attends to: one chunk."""
        return self.chunk_tokens

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Refuse every request, because this class wraps a backend that was already selected."""
        return Verdict.refuse("wraps another backend, and cannot be selected itself")

    def kv_layout(self) -> KVCacheLayout:
        return self.inner.kv_layout()

    def plan(self, batch: AttentionBatch) -> Any:
        return self.inner.plan(self._chunks(batch))

    def plan_fixed(self, batch: AttentionBatch) -> FixedPlan:
        """Plan attention to chunks for a captured graph; see ``AttentionBackend.plan_fixed``."""
        chunks = self._chunks(batch)
        return FixedPlan(self.inner.plan_fixed(chunks), chunks)

    def update_plan(self, plan: FixedPlan, batch: AttentionBatch) -> None:
        """Copy the chunks of ``batch`` into the tensors that the captured graph reads."""
        # The graph reads fixed addresses, so values are copied into the captured tensors.
        captured, chunks = plan.chunks, self._chunks(batch)
        pairs = [(captured, chunks)]
        if captured.host is not None and chunks.host is not None:
            pairs.append((captured.host, chunks.host))
        for target, source in pairs:
            for field in fields(AttentionBatch):
                value = getattr(target, field.name)
                if isinstance(value, Tensor):
                    value.copy_(getattr(source, field.name))
        self.inner.update_plan(plan.plan, captured)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        plan: Any,
        **options: Any,
    ) -> Tensor:
        return self.inner.forward(query, key, value, cache, _inner_plan(plan), **options)

    def prepare_scales(self, key_scale: Tensor, value_scale: Tensor) -> Any:
        return self.inner.prepare_scales(key_scale, value_scale)

    def _chunks(self, batch: AttentionBatch) -> AttentionBatch:
        return chunks_of(batch, self.chunk_tokens, self.spec.page_size)


def chunk_layers(layers: Iterable[Attention], chunk_tokens: int) -> None:
    """Limit attention layers to chunks, keeping one plan for layers that share a backend."""
    chunked_backends: dict[AttentionBackend, ChunkedBackend] = {}
    for layer in layers:
        inner = layer.backend
        layer.backend = chunked_backends.setdefault(inner, ChunkedBackend(inner, chunk_tokens))


def chunks_of(batch: AttentionBatch, chunk_tokens: int, page_size: int) -> AttentionBatch:
    """Describe each chunk that has new tokens as a sequence of its own, ``[V]``, in token order.

    For a decode batch (one new token per sequence) no value is read back from the device.
    """
    # A decode step: one chunk per sequence, computed on the device, so that a graph can capture it.
    if batch.max_query_tokens == 1:
        last_chunks = _last_chunks(batch, chunk_tokens, page_size)
        host = None if batch.host is None else _last_chunks(batch.host, chunk_tokens, page_size)
        return replace(last_chunks, host=host)
    split = _split_prompts(batch.on_host(), chunk_tokens, page_size)
    device = batch.slots.device
    if device.type == "cpu":
        return split
    # The slots to write are the same as in the unsplit batch, which has them on the device already.
    names = ("query_starts", "seq_lens", "page_table")
    moved = {name: getattr(split, name).to(device, non_blocking=True) for name in names}
    return replace(split, **moved, slots=batch.slots, host=split)


def _last_chunks(batch: AttentionBatch, chunk_tokens: int, page_size: int) -> AttentionBatch:
    """Describe the last chunk of each sequence as a sequence of its own."""
    chunk_starts = (batch.seq_lens - 1).clamp(min=0) // chunk_tokens * chunk_tokens
    return replace(
        batch,
        seq_lens=batch.seq_lens - chunk_starts,
        page_table=_pages(batch.page_table, chunk_starts, chunk_tokens, page_size),
        max_seq_tokens=min(chunk_tokens, batch.max_seq_tokens),
        host=None,
    )


def _split_prompts(batch: AttentionBatch, chunk_tokens: int, page_size: int) -> AttentionBatch:
    """Describe each chunk with new tokens as a sequence, for a batch in host memory."""
    rows, chunk_starts, chunk_ends, new_counts = list[int](), list[int](), list[int](), list[int]()
    starts = batch.query_starts.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        position = length - (starts[row + 1] - starts[row])
        while position < length:
            chunk_start = position // chunk_tokens * chunk_tokens
            chunk_end = min(chunk_start + chunk_tokens, length)
            rows.append(row)
            chunk_starts.append(chunk_start)
            chunk_ends.append(chunk_end)
            new_counts.append(chunk_end - position)
            position = chunk_end
    start_tensor = torch.tensor(chunk_starts, dtype=torch.int64)
    lengths = torch.tensor(chunk_ends, dtype=torch.int64) - start_tensor
    return replace(
        batch,
        query_starts=torch.tensor([0, *new_counts], dtype=torch.int64).cumsum(0),
        seq_lens=lengths,
        page_table=_pages(batch.page_table[rows], start_tensor, chunk_tokens, page_size),
        max_query_tokens=max(new_counts),
        max_seq_tokens=int(lengths.max()),
        host=None,
    )


def _pages(table: Tensor, chunk_starts: Tensor, chunk_tokens: int, page_size: int) -> Tensor:
    """Return the page table ``[V, pages per chunk]`` of chunks that begin at ``chunk_starts``."""
    width = table.shape[1]
    # A table narrower than a chunk means that no sequence is as long as a chunk.
    num_pages = min(chunk_tokens // page_size, width)
    columns = (chunk_starts // page_size)[:, None] + torch.arange(num_pages, device=table.device)
    # A table may end within a chunk; columns past its end repeat its last page and are never read.
    return table.gather(1, columns.clamp(max=width - 1))


def _inner_plan(plan: Any) -> Any:
    return plan.plan if isinstance(plan, FixedPlan) else plan
