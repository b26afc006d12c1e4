"""Fixed memory that a captured decode step reads: filled and padded before each replay.

Dimensions: B sequences of the bucket, each with one token, P pages of the longest sequence, S page
size.
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
    """Inputs of one bucket's graph, at addresses that never change.

    A padding row is a sequence of one token in a slot of a spare page. The sequence attends to the
    first token of that page, which is padding of the same step: slots are handed out from the last
    row on. So padding touches no real sequence, and no row is empty.

    Attributes:
        step: The batch to capture. Token ids and positions are ``[B]`` int64. The longest query and
            longest sequence are the capacity of the memory, because a graph fixes both. Attention
            inputs have a copy on the host.
    """

    def __init__(
        self,
        bucket: Bucket,
        page_size: int,
        spare_pages: Sequence[Sequence[int]],
        device: str,
        with_states: bool = False,
        with_encoder: bool = False,
    ) -> None:
        """Allocate the memory of a bucket; all rows are padding until the first ``fill``.

        Args:
            spare_pages: For each page pool, pages that no sequence gets, with one slot per row.
            with_states: Whether the model keeps recurrent states; padding rows have none.
            with_encoder: Whether the last pool belongs to the encoder inputs, which have other
                lengths than the sequences.
        Raises: ConfigError: the spare pages have too few slots.
        """
        size, num_pages = bucket
        for pool_spare_pages in spare_pages:
            if len(pool_spare_pages) * page_size < size:
                raise ConfigError(
                    f"{len(pool_spare_pages)} spare pages of {page_size} slots cannot take the "
                    f"{size} rows of padding of a bucket of {size}. "
                    f"Try: {-(-size // page_size)} of them"
                )
        self.size = size
        self._padded_from = 0
        # Indices of the pools that have sequence lengths of their own.
        self._length_pools = (0, len(spare_pages) - 1) if with_encoder else (0,)
        # The last row gets the first slot, because padding always fills the last rows.
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
            for pool_spare_pages in spare_pages
            for pages in [torch.tensor([*pool_spare_pages], dtype=torch.int64)[order // page_size]]
        ]
        on_host = torch.device(device).type == "cpu"
        hosts = [] if on_host else _copied(paddings, "cpu", with_encoder)
        first, *other_batches = batches = _copied(paddings, device, with_encoder, hosts)
        # Pairs of batches to fill and their padding: on the device, and also on the host.
        self._targets = [(batches, _copied(paddings, device, with_encoder))]
        if hosts:
            self._targets.append((hosts, paddings))
        self.step = StepBatch(
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            first,
            tuple(other_batches),
        )

    def fill(self, batch: StepBatch) -> int:
        """Write a step of one token per sequence into the memory, and return the number of rows.

        Raises: ConfigError: the step has other rows, or exceeds the memory.
        """
        attention, capacity = batch.attention, self.step.attention
        count, width = attention.page_table.shape
        tokens = len(batch.token_ids)
        if not 0 < count <= self.size or attention.max_query_tokens != 1 or tokens != count:
            raise ConfigError(
                f"a graph of {self.size} rows takes 1 to {self.size} sequences of one token, got "
                f"{count} sequences of {tokens} tokens. Try: run this step without a graph"
            )
        if width > capacity.page_table.shape[1]:
            max_width = capacity.page_table.shape[1]
            raise ConfigError(
                f"a graph with room for {max_width} pages per sequence got {width}. "
                "Try: capture for a longer context"
            )
        self.step.token_ids[:count].copy_(batch.token_ids, non_blocking=True)
        self.step.positions[:count].copy_(batch.positions, non_blocking=True)
        for batches, _ in self._targets:
            on_device = batches[0] is capacity
            sources = [b if on_device else b.on_host() for b in batch.by_pool]
            first, source = batches[0], sources[0]
            for number in self._length_pools:
                lengths = batches[number].seq_lens
                lengths[:count].copy_(sources[number].seq_lens, non_blocking=True)
            if first.state_slots is not None:
                assert source.state_slots is not None  # of the same model
                first.state_slots[:count].copy_(source.state_slots, non_blocking=True)
            for target, source in zip(batches, sources, strict=True):
                target.slots[:count].copy_(source.slots, non_blocking=True)
                # Entries after a sequence's pages are not read, but must be valid page numbers:
                # those of earlier steps are.
                target.page_table[:count, :width].copy_(source.page_table, non_blocking=True)
        # Rows from the former count on are padding already.
        if count < self._padded_from:
            self._pad(count, self._padded_from)
        self._padded_from = count
        return count

    def _pad(self, first: int, last: int) -> None:
        """Turn the rows ``first`` to ``last - 1`` into padding, as all rows after them are."""
        self.step.token_ids[first:last].zero_()
        self.step.positions[first:last].zero_()
        for batches, paddings in self._targets:
            for number in self._length_pools:
                batches[number].seq_lens[first:last].fill_(1)
            if batches[0].state_slots is not None:
                batches[0].state_slots[first:last].fill_(-1)
            for target, padding in zip(batches, paddings, strict=True):
                target.slots[first:last].copy_(padding.slots[first:last])
                target.page_table[first:last, 0].copy_(padding.page_table[first:last, 0])


def _copied(
    batches: Sequence[AttentionBatch],
    device: str,
    with_encoder: bool,
    hosts: Sequence[AttentionBatch] = (),
) -> list[AttentionBatch]:
    """Copy the batches to ``device``, each with its host copy from ``hosts``.

    The copies have separate pages and slots (and lengths, for encoder inputs), and share all else.
    """
    copies: list[AttentionBatch] = []
    for number, batch in enumerate(batches):
        host = hosts[number] if hosts else None
        names = ["page_table", "slots"] if copies else [field.name for field in fields(batch)]
        if with_encoder and batch is batches[-1]:
            names.append("seq_lens")
        tensors = {
            name: getattr(batch, name).to(device, copy=True)
            for name in names
            if isinstance(getattr(batch, name), torch.Tensor)
        }
        copies.append(replace(copies[0] if copies else batch, **tensors, host=host))
    return copies
