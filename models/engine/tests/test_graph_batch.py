"""Buckets and padding of captured steps; what a graph replays is a step run here anew.

Dimensions: B sequences, N heads, D head size, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from interposer import AttentionBatch
from interposer.errors import ConfigError
from interposer_engine._batch import StepBatch
from interposer_engine._graphs import Bucket, DecodeGraphs, GraphBatch, GraphBuckets
from interposer_ops.attention import paged_attention
from interposer_ops.caches import reshape_and_cache

HEADS, SIZE, PAGE, PAGES = 2, 8, 4, 3
TABLE = torch.randn(64, HEADS, SIZE, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("count", "size"), [(0, None), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 20), (21, None)]
)
def test_a_batch_runs_in_the_smallest_bucket_that_holds_it(count: int, size: int | None) -> None:
    bucket = GraphBuckets((1, 2, 4, 8, 16, 20), (9,)).bucket_for(count, 7)
    assert bucket == (None if size is None else Bucket(size, 9))


@pytest.mark.parametrize(
    ("most", "widths"),
    [
        (1, (1,)),
        (64, (64,)),
        (65, (64, 65)),
        (1000, (64, 256, 1000)),
        (4096, (64, 256, 1024, 4096)),
    ],
)
def test_widths_reach_the_longest_sequence(most: int, widths: tuple[int, ...]) -> None:
    buckets = GraphBuckets.up_to(1, most)
    assert buckets.widths == widths
    assert all(buckets.bucket_for(1, pages) == Bucket(1, pages) for pages in widths)
    assert buckets.bucket_for(1, most + 1) is None


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 64, 100, 256, 300, 512, 1000])
def test_buckets_hold_every_batch_up_to_the_largest(most: int) -> None:
    buckets = GraphBuckets.up_to(most, 1)
    assert buckets.sizes[-1] == most
    actual = [buckets.bucket_for(count, 1) for count in range(1, most + 1)]
    padding = [b.num_sequences - count for count, b in enumerate(actual, 1) if b is not None]
    assert len(padding) == most
    assert min(padding) == 0
    assert all(added < count for count, added in enumerate(padding, 1) if added)
    assert max(padding) <= 15


@pytest.mark.parametrize("numbers", [(), (0, 1), (4, 2), (2, 2), (-1,)])
def test_buckets_must_ascend(numbers: tuple[int, ...]) -> None:
    for sizes, widths in ((numbers, (1,)), ((1,), numbers)):
        with pytest.raises(ConfigError, match="must be positive numbers that ascend"):
            GraphBuckets(sizes, widths)


def decoding(lengths: Sequence[int], turn: int = 0) -> StepBatch:
    """Return a batch in which sequence b has the pages from ``b * PAGES`` on."""
    tables = torch.arange(len(lengths) * PAGES).view(len(lengths), PAGES)
    width = -(-max(lengths) // PAGE)
    last = torch.tensor(lengths) - 1
    slots = tables[torch.arange(len(lengths)), last // PAGE] * PAGE + last % PAGE
    attention = AttentionBatch(
        query_starts=torch.arange(len(lengths) + 1),
        seq_lens=torch.tensor(lengths),
        page_table=tables[:, :width].contiguous(),
        slots=slots,
        max_query_tokens=1,
        max_seq_tokens=max(lengths),
    )
    return StepBatch(torch.arange(len(lengths)) + turn, last, attention)


def cache_for(num_sequences: int, spare: int) -> torch.Tensor:
    """Return ``[2, P, S, N, D]``: random where sequences may read, NaN on spare pages."""
    generator = torch.Generator().manual_seed(1)
    pages = num_sequences * PAGES + spare
    cache = torch.randn(2, pages, PAGE, HEADS, SIZE, generator=generator)
    cache[:, num_sequences * PAGES :] = torch.nan
    return cache


def step_on(cache: torch.Tensor) -> Callable[..., torch.Tensor]:
    def step(step: StepBatch, _plans: object = None) -> torch.Tensor:
        batch = step.attention
        query = TABLE[step.token_ids] + step.positions[:, None, None] / 7
        keys, values = cache.unbind(0)
        reshape_and_cache(query, -query, keys, values, batch.slots)
        return paged_attention(
            *(query, keys, values, batch.page_table, batch.query_starts, batch.seq_lens),
            *(batch.max_query_tokens, 0.3, True, None, None),
        )

    return step


class Recorder:
    """Stands for a platform's capture: what is replayed is the captured step on its memory."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        self.captured += 1
        step()

        def replay() -> object:
            self.replayed += 1
            return step()

        return replay


@pytest.mark.parametrize("lengths", [[5], [1, 12], [3, 4, 9], [12, 1, 2, 8, 5]])
def test_padding_changes_nothing_of_the_step(lengths: list[int]) -> None:
    count, buckets = len(lengths), GraphBuckets((1, 4, 8), (PAGES,))
    spare = DecodeGraphs.pages_for(buckets, PAGE)
    assert spare == 2
    plain, padded = cache_for(count, spare), cache_for(count, spare)
    recorder = Recorder()
    graphs = DecodeGraphs(
        step_on(padded),
        recorder.capture_graph,
        buckets,
        page_size=PAGE,
        spare_pages=[range(count * PAGES, count * PAGES + spare)],
        device="cpu",
    )
    for turn in range(3):
        batch = decoding(lengths, turn)
        actual = graphs.run(batch)
        expected = step_on(plain)(batch)
        torch.testing.assert_close(actual, expected)
        assert torch.equal(plain[:, : count * PAGES], padded[:, : count * PAGES])
    assert (recorder.captured, recorder.replayed) == (1, 3)


def test_a_batch_that_shrinks_and_grows_stays_right() -> None:
    """Rows that held sequences become padding again, and sequences again."""
    plain, padded = cache_for(7, 2), cache_for(7, 2)
    graphs = DecodeGraphs(
        step_on(padded),
        Recorder().capture_graph,
        GraphBuckets((8,), (PAGES,)),
        page_size=PAGE,
        spare_pages=[(21, 22)],
        device="cpu",
    )
    for turn, lengths in enumerate(([12] * 7, [3, 2], [9], [5, 6, 7, 8], [1], [2] * 7)):
        batch = decoding(lengths, turn)
        torch.testing.assert_close(graphs.run(batch), step_on(plain)(batch))
        assert torch.equal(plain[:, :21], padded[:, :21])


def test_each_bucket_is_captured_once() -> None:
    recorder = Recorder()
    graphs = DecodeGraphs(
        step_on(cache_for(8, 2)),
        recorder.capture_graph,
        GraphBuckets((2, 8), (1, PAGES)),
        page_size=PAGE,
        spare_pages=[(24, 25)],
        device="cpu",
    )
    for lengths in ([3] * 8, [3], [2, 2], [1] * 5, [1] * 8, [9], [12, 1]):
        assert len(graphs.run(decoding(lengths))) == len(lengths)
    assert (recorder.captured, recorder.replayed, len(graphs)) == (3, 7, 3)
    graphs.forget()
    graphs.run(decoding([3]))
    assert (recorder.captured, len(graphs)) == (4, 1)


@pytest.mark.parametrize("case", ["too many sequences", "a prompt", "too long a context"])
def test_a_step_that_fits_no_graph_runs_without_one(case: str) -> None:
    recorder = Recorder()
    graphs = DecodeGraphs(
        step_on(cache_for(4, 1)),
        recorder.capture_graph,
        GraphBuckets((1, 2), (2,)),
        page_size=PAGE,
        spare_pages=[(12,)],
        device="cpu",
    )
    batch = decoding({"too many sequences": [1, 1, 1], "a prompt": [2]}.get(case, [9]))
    if case == "a prompt":
        attention = replace(
            batch.attention,
            query_starts=torch.tensor([0, 2]),
            slots=torch.tensor([0, 1]),
            max_query_tokens=2,
        )
        batch = StepBatch(torch.tensor([0, 0]), torch.tensor([0, 1]), attention)
    results = graphs.run(batch)
    assert isinstance(results, torch.Tensor)
    assert results.isfinite().all()
    assert recorder.captured == 0


def test_every_row_of_padding_has_a_slot_of_its_own() -> None:
    held = GraphBatch(Bucket(7, 3), PAGE, [(30, 31)], "cpu")
    own = held.step.attention
    assert own.slots.tolist() == [126, 125, 124, 123, 122, 121, 120]
    assert own.page_table[:, 0].tolist() == [31, 31, 31, 30, 30, 30, 30]
    addresses = [own.slots.data_ptr(), own.page_table.data_ptr()]
    held.fill(decoding([3] * 7))
    batch = decoding([5, 3])
    held.fill(batch)
    assert own.slots.tolist() == [*batch.attention.slots.tolist(), 124, 123, 122, 121, 120]
    assert own.page_table[:, 0].tolist() == [0, 3, 31, 30, 30, 30, 30]
    assert own.seq_lens.tolist() == [5, 3, 1, 1, 1, 1, 1]
    assert held.step.token_ids.tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert own.max_seq_tokens == 3 * PAGE
    assert addresses == [own.slots.data_ptr(), own.page_table.data_ptr()]


def test_too_few_spare_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 spare pages of 4 slots cannot take the 9 rows"):
        GraphBatch(Bucket(9, 3), PAGE, [(30,)], "cpu")


def test_a_batch_that_does_not_fit_is_refused() -> None:
    held = GraphBatch(Bucket(2, 1), PAGE, [(30,)], "cpu")
    with pytest.raises(ConfigError, match="takes 1 to 2 sequences of one token, got 3 sequences"):
        held.fill(decoding([1, 1, 1]))
    with pytest.raises(ConfigError, match="room for 1 pages per sequence got 2"):
        held.fill(decoding([5]))
