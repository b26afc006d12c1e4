"""Captured graphs of decode steps: one graph per batch size, with inputs in fixed memory.

A batch is copied into the memory of the smallest graph that fits, and padded, before each replay.

Dimensions: B sequences of the bucket, each with one token, P pages of the longest sequence, S page
size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from interposer import AttentionBackend, AttentionBatch, Verdict
from interposer.errors import ConfigError, GraphError, described, foreign_errors
from interposer_engine._batch import StepBatch
from interposer_ops.devices.graphs import judge_compilation

_FIRST_WIDTH = 64
_WIDER = 4


class Bucket(NamedTuple):
    """Capacity of one graph: the number of sequences, and the pages of the longest sequence."""

    num_sequences: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class GraphBuckets:
    """The captured batch sizes and page-table widths; a batch runs in the smallest that fits.

    Attributes:
        sizes: Numbers of sequences, ascending.
        widths: Numbers of pages per sequence, ascending. A graph always runs as for the longest
            sequence that fits.

    Raises: ConfigError: a list is empty, not ascending, or has a number that is not positive.
    """

    sizes: tuple[int, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        for numbers in (self.sizes, self.widths):
            if not numbers or numbers[0] < 1 or list(numbers) != sorted({*numbers}):
                raise ConfigError(
                    f"buckets are {numbers}, must be positive numbers that ascend. "
                    "Try: GraphBuckets.up_to(64, 128)"
                )

    @classmethod
    def up_to(cls, max_sequences: int, max_pages: int) -> GraphBuckets:
        """Return buckets for batch sizes 1, 2, 4, 8, then in steps of 8 up to 256, then of 16.

        So padding is less than half of a small batch and a few percent of a large one, and the
        number of graphs stays small. Widths grow by a factor of four, up to ``max_pages``.
        """
        steps = [1, 2, 4, *range(8, 257, 8), *range(272, max(max_sequences, 272) + 1, 16)]
        widths = []
        width = _FIRST_WIDTH
        while width < max_pages:
            widths.append(width)
            width *= _WIDER
        return cls(
            (*(size for size in steps if size < max_sequences), max_sequences), (*widths, max_pages)
        )

    def bucket_for(self, num_sequences: int, num_pages: int) -> Bucket | None:
        """Return the smallest bucket that fits the batch; None if no bucket does."""
        size, width = (
            _smallest_at_least(self.sizes, num_sequences),
            _smallest_at_least(self.widths, num_pages),
        )
        return None if size is None or width is None else Bucket(size, width)


def _smallest_at_least(numbers: tuple[int, ...], minimum: int) -> int | None:
    index = bisect_left(numbers, minimum)
    return numbers[index] if minimum > 0 and index < len(numbers) else None


class GraphBatch:
    """Inputs of one captured graph, at addresses that never change.

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
        """Allocate the input memory of a bucket; all rows are padding until the first ``fill``.

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
        hosts = [] if on_host else _copy_batches(paddings, "cpu", with_encoder)
        first, *other_batches = batches = _copy_batches(paddings, device, with_encoder, hosts)
        # Pairs of batches to fill and their padding: on the device, and also on the host.
        self._targets = [(batches, _copy_batches(paddings, device, with_encoder))]
        if hosts:
            self._targets.append((hosts, paddings))
        self.step = StepBatch(
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            first,
            tuple(other_batches),
        )

    def fill(self, batch: StepBatch) -> int:
        """Write a step of one token per sequence into the input memory; return the number of rows.

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
        """Turn the inputs of rows ``first`` to ``last - 1`` into padding, as all later rows are."""
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


def _copy_batches(
    batches: Sequence[AttentionBatch],
    device: str,
    with_encoder: bool,
    hosts: Sequence[AttentionBatch] = (),
) -> list[AttentionBatch]:
    """Copy the attention batches to ``device``, each linked to its host copy from ``hosts``.

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


Plans = Mapping[AttentionBackend, Any]
"""Plans of the attention backends that plan on the host; other backends plan within the step."""

Results = torch.Tensor | tuple[torch.Tensor, ...]
"""One tensor or several, each with one row per token."""

Step = Callable[[StepBatch, Plans], Results]
"""Computes the results of a batch."""

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""``Platform.capture_graph``."""


class _Captured(NamedTuple):
    batch: GraphBatch
    plans: Plans
    replay: Callable[[], object]


class DecodeGraphs:
    """Runs a step of one token per sequence through the smallest captured graph that fits.

    Attributes:
        compiled: Accepts; or refuses with the reason if torch.compile compiles part of the model,
            which then runs without graphs because the compiler may capture graphs, too.
    """

    def __init__(
        self,
        step: Step,
        capture: Capture,
        buckets: GraphBuckets,
        *,
        page_size: int,
        spare_pages: Sequence[Sequence[int]],
        device: str,
        backends: Mapping[AttentionBackend, int] | None = None,
        model: nn.Module | None = None,
        required: bool = False,
        with_states: bool = False,
        with_encoder: bool = False,
    ) -> None:
        """Prepare the graphs, which are captured at the first steps.

        Args:
            step: The function to capture. The function must read only arguments and memory that
                never moves.
            capture: ``Platform.capture_graph``.
            buckets: Batch sizes to capture.
            spare_pages: For each page pool, pages that no sequence gets; see ``pages_for``.
            backends: The attention backends within ``step``, with the index of the page pool of
                each. Backends that plan on the host plan before each replay, others within the
                graph.
            model: The model within ``step``, which is checked for torch.compile before each
                capture.
            required: Whether a failed capture raises instead of running without graphs.
            with_states, with_encoder: See ``GraphBatch``.
        """
        self.buckets = buckets
        self.compiled = Verdict.accept()
        self._step = step
        self._capture = capture
        self._memory = (page_size, spare_pages, device, with_states, with_encoder)
        self._model = model
        self._required = required
        pool_indices = backends or {}
        self._planners = {
            backend: pool_index
            for backend, pool_index in pool_indices.items()
            if backend.plans_on_host
        }
        self._graphs: dict[Bucket, _Captured] = {}

    def __len__(self) -> int:
        """Return the number of captured graphs."""
        return len(self._graphs)

    @staticmethod
    def pages_for(buckets: GraphBuckets, page_size: int) -> int:
        """Return the number of spare cache pages to which padding rows write."""
        return -(-buckets.sizes[-1] // page_size)

    def run(self, batch: StepBatch) -> Results:
        """Compute the results of ``step``, by a captured graph if the batch fits a bucket.

        The next step overwrites the returned tensors.

        Raises:
            GraphError: the step cannot be captured.
            ConfigError: graphs are required, but torch.compile compiles part of the model.
        """
        attention = batch.attention
        # Graphs hold exactly one token per sequence, so steps with prompt chunks or draft tokens
        # are eager.
        decodes = attention.max_query_tokens == 1 and len(batch.token_ids) == len(
            attention.seq_lens
        )
        bucket = self.buckets.bucket_for(*attention.page_table.shape) if decodes else None
        if bucket is None:
            return self._step(batch, {})
        if bucket not in self._graphs:
            self.compiled = self._judge()
            if not self.compiled:
                return self._step(batch, {})
            self._graphs[bucket] = self._graph_of(bucket)
        graph_batch, plans, replay = self._graphs[bucket]
        count = graph_batch.fill(batch)
        # Backends that plan on the host update their plans outside of the graph.
        for backend, plan in plans.items():
            backend.update_plan(plan, graph_batch.step.by_pool[self._planners[backend]])
        results = replay()
        if isinstance(results, tuple):
            return tuple(result[:count] for result in results)
        assert isinstance(results, torch.Tensor)
        return results[:count]

    def forget(self) -> None:
        """Drop all captured graphs because their memory has moved; later steps capture new ones."""
        self._graphs.clear()

    def _judge(self) -> Verdict:
        verdict = Verdict.accept() if self._model is None else judge_compilation(self._model)
        if self._required and not verdict:
            raise ConfigError(f"graphs='on' was requested, but {verdict.reason}")
        return verdict

    def _graph_of(self, bucket: Bucket) -> _Captured:
        graph_batch = GraphBatch(bucket, *self._memory)
        try:
            batches = graph_batch.step.by_pool
            plans = {
                backend: backend.plan_fixed(batches[pool_index])
                for backend, pool_index in self._planners.items()
            }
            replay = self._capture(lambda: self._step(graph_batch.step, plans))
        except foreign_errors() as error:
            raise GraphError(
                f"a decode step of {bucket.num_sequences} sequences could not be captured, though "
                f"all that runs in it promises to be graph_safe: {described(error)}. "
                "Try: Config(graphs='off')"
            ) from error
        return _Captured(graph_batch, plans, replay)
