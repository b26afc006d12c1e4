"""The memory that a captured decode step reads: written before each replay, padded here alone.

Dimensions: B sequences of the bucket, each with one token, P pages of the longest sequence,
S page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from interposer import AttentionBatch
from interposer.errors import ConfigError
from interposer_models._engine.batch import StepBatch
from interposer_models._engine.graph_buckets import Bucket


class GraphBatch:
    """One bucket's inputs at addresses that never change.

    A row of padding is a sequence of one token, which goes to a slot of a spare page and sees the
    first token there. That one is padding too, and written in the same step: slots are given to
    the last row first. So nothing of another sequence is touched, and no row is empty.

    Attributes:
        step: token ids and positions, each ``[B]`` int64, and what attention reads, which lies in
            host memory as well; the longest query and the longest sequence are those that the
            memory has room for, as a graph fixes them.
    """

    def __init__(
        self,
        bucket: Bucket,
        page_size: int,
        spare_pages: Sequence[Sequence[int]],
        device: str,
        with_states: bool = False,
        with_sources: bool = False,
    ) -> None:
        """Take memory for a bucket; at first all rows are padding, with which it is captured.

        Args:
            spare_pages: of each pool, pages that no sequence is ever given, with a slot for each
                row.
            with_states: layers keep a state of each sequence; rows of padding have none.
            with_sources: the last pool is that of sources, which have lengths of their own.
        Raises: ConfigError: the spare pages have too few slots.
        """
        size, num_pages = bucket
        for own in spare_pages:
            if len(own) * page_size < size:
                raise ConfigError(
                    f"{len(own)} spare pages of {page_size} slots cannot take the {size} "
                    f"rows of padding of a bucket of {size}. Try: {-(-size // page_size)} of them"
                )
        self.size = size
        self._padded_from = 0
        # The pools whose lengths are not those of the first one.
        self._lengths = (0, len(spare_pages) - 1) if with_sources else (0,)
        order = torch.arange(size).flip(0)
        paddings = [
            AttentionBatch(
                query_starts=torch.arange(size + 1),
                seq_lens=torch.ones(size, dtype=torch.int64),
                page_table=pages[:, None].repeat(1, num_pages),
                slots=pages * page_size + order % page_size,
                max_query_tokens=1,
                max_seq_tokens=num_pages * page_size,
                state_slots=torch.full((size,), -1) if with_states else None,
            )
            for own in spare_pages
            for pages in [torch.tensor([*own], dtype=torch.int64)[order // page_size]]
        ]
        on_host = torch.device(device).type == "cpu"
        hosts = [] if on_host else _copied(paddings, "cpu", with_sources)
        first, *further = batches = _copied(paddings, device, with_sources, hosts)
        # What is written, and the padding of it: on the device, and beside it on the host.
        self._written = [(batches, _copied(paddings, device, with_sources))]
        if hosts:
            self._written.append((hosts, paddings))
        self.step = StepBatch(
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            first,
            tuple(further),
        )

    def fill(self, batch: StepBatch) -> int:
        """Write a step of one token per sequence, and return its number of rows.

        Raises: ConfigError: it is no such step, or does not fit.
        """
        given, own = batch.attention, self.step.attention
        count, width = given.page_table.shape
        tokens = len(batch.token_ids)
        if not 0 < count <= self.size or given.max_query_tokens != 1 or tokens != count:
            raise ConfigError(
                f"a graph of {self.size} rows takes 1 to {self.size} sequences of one token, got "
                f"{count} sequences of {tokens} tokens. Try: run this step without a graph"
            )
        if width > own.page_table.shape[1]:
            raise ConfigError(
                f"a graph with room for {own.page_table.shape[1]} pages per sequence got {width}. "
                "Try: capture for a longer context"
            )
        self.step.token_ids[:count].copy_(batch.token_ids, non_blocking=True)
        self.step.positions[:count].copy_(batch.positions, non_blocking=True)
        for batches, _ in self._written:
            on_device = batches[0] is own
            sources = [each if on_device else each.on_host() for each in batch.by_pool]
            first, source = batches[0], sources[0]
            for number in self._lengths:
                lengths = batches[number].seq_lens
                lengths[:count].copy_(sources[number].seq_lens, non_blocking=True)
            if first.state_slots is not None:
                assert source.state_slots is not None  # of the same model
                first.state_slots[:count].copy_(source.state_slots, non_blocking=True)
            for held, source in zip(batches, sources, strict=True):
                held.slots[:count].copy_(source.slots, non_blocking=True)
                # Entries behind a sequence's pages are read by nobody, but have to be pages: those
                # of former steps are.
                held.page_table[:count, :width].copy_(source.page_table, non_blocking=True)
        if count < self._padded_from:
            self._pad(count, self._padded_from)
        self._padded_from = count
        return count

    def _pad(self, first: int, last: int) -> None:
        """Make rows ``first`` to ``last - 1`` padding, as those behind them are."""
        self.step.token_ids[first:last].zero_()
        self.step.positions[first:last].zero_()
        for batches, paddings in self._written:
            for number in self._lengths:
                batches[number].seq_lens[first:last].fill_(1)
            if batches[0].state_slots is not None:
                batches[0].state_slots[first:last].fill_(-1)
            for held, padding in zip(batches, paddings, strict=True):
                held.slots[first:last].copy_(padding.slots[first:last])
                held.page_table[first:last, 0].copy_(padding.page_table[first:last, 0])


def _copied(
    batches: Sequence[AttentionBatch],
    device: str,
    with_sources: bool,
    hosts: Sequence[AttentionBatch] = (),
) -> list[AttentionBatch]:
    """Return the batches in memory of their own on ``device``, with ``hosts`` beside them.

    They differ in pages and slots, that of sources in lengths too, and share the rest.
    """
    copies: list[AttentionBatch] = []
    for number, batch in enumerate(batches):
        host = hosts[number] if hosts else None
        names = ["page_table", "slots"] if copies else [field.name for field in fields(batch)]
        if with_sources and batch is batches[-1]:
            names.append("seq_lens")
        tensors = {
            name: getattr(batch, name).to(device, copy=True)
            for name in names
            if isinstance(getattr(batch, name), torch.Tensor)
        }
        copies.append(replace(copies[0] if copies else batch, **tensors, host=host))
    return copies
