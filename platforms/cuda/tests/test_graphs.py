"""Buckets, padding and refusals of captured steps; what a graph replays is a step run here anew.

Dimensions: B sequences, N heads, D head size, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from interposer import AttentionBatch, Config, Resolver, Site, current_registry
from interposer.capability import Capability, Device
from interposer.errors import ConfigError
from interposer_cuda.decode_graphs import DecodeGraphs
from interposer_cuda.graph_batch import GraphBatch
from interposer_cuda.graph_buckets import GraphBuckets
from interposer_cuda.graph_capture import judge_choices, judge_step
from interposer_ops.attention import paged_attention
from interposer_ops.experts import fused_experts
from interposer_ops.kv_cache import reshape_and_cache

HEADS, SIZE, PAGE, PAGES = 2, 8, 4, 3
TABLE = torch.randn(64, HEADS, SIZE, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("count", "size"), [(0, None), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 20), (21, None)]
)
def test_a_batch_runs_in_the_smallest_bucket_that_holds_it(count: int, size: int | None) -> None:
    assert GraphBuckets((1, 2, 4, 8, 16, 20)).size_for(count) == size


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 64, 100, 256, 300, 512, 1000])
def test_buckets_hold_every_batch_up_to_the_largest(most: int) -> None:
    buckets = GraphBuckets.up_to(most)
    assert buckets.sizes[-1] == most
    sizes = [buckets.size_for(count) for count in range(1, most + 1)]
    padding = [size - count for count, size in enumerate(sizes, 1) if size is not None]
    assert len(padding) == most
    assert min(padding) == 0
    assert all(added < count for count, added in enumerate(padding, 1) if added)
    assert max(padding) <= 15


@pytest.mark.parametrize("sizes", [(), (0, 1), (4, 2), (2, 2), (-1,)])
def test_buckets_must_ascend(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must be positive numbers that ascend"):
        GraphBuckets(sizes)


def decoding(lengths: Sequence[int]) -> AttentionBatch:
    """Return a batch in which sequence b has the pages from ``b * PAGES`` on."""
    tables = torch.arange(len(lengths) * PAGES).view(len(lengths), PAGES)
    width = -(-max(lengths) // PAGE)
    last = torch.tensor(lengths) - 1
    slots = tables[torch.arange(len(lengths)), last // PAGE] * PAGE + last % PAGE
    return AttentionBatch(
        query_starts=torch.arange(len(lengths) + 1),
        seq_lens=torch.tensor(lengths),
        page_table=tables[:, :width].contiguous(),
        slots=slots,
        max_query_tokens=1,
        max_seq_tokens=max(lengths),
    )


def cache_for(num_sequences: int, spare: int) -> torch.Tensor:
    """Return ``[2, P, S, N, D]``: random where sequences may read, NaN on spare pages."""
    generator = torch.Generator().manual_seed(1)
    pages = num_sequences * PAGES + spare
    cache = torch.randn(2, pages, PAGE, HEADS, SIZE, generator=generator)
    cache[:, num_sequences * PAGES :] = torch.nan
    return cache


def step_on(cache: torch.Tensor) -> Callable[..., torch.Tensor]:
    def step(
        token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        query = TABLE[token_ids] + positions[:, None, None] / 7
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
    count, buckets = len(lengths), GraphBuckets((1, 4, 8))
    spare = DecodeGraphs.pages_for(buckets, PAGE)
    assert spare == 2
    plain, padded = cache_for(count, spare), cache_for(count, spare)
    recorder = Recorder()
    graphs = DecodeGraphs(
        step_on(padded),
        recorder.capture_graph,
        buckets,
        num_pages=PAGES,
        page_size=PAGE,
        spare_pages=range(count * PAGES, count * PAGES + spare),
        device="cpu",
    )
    for turn in range(3):
        batch = decoding(lengths)
        token_ids = torch.arange(count) + turn
        positions = batch.seq_lens - 1
        found = graphs.run(token_ids, positions, batch)
        expected = step_on(plain)(token_ids, positions, batch)
        torch.testing.assert_close(found, expected)
        assert torch.equal(plain[:, : count * PAGES], padded[:, : count * PAGES])
    assert (recorder.captured, recorder.replayed) == (1, 3)


def test_each_bucket_is_captured_once() -> None:
    recorder = Recorder()
    cache = cache_for(8, 2)
    graphs = DecodeGraphs(
        step_on(cache),
        recorder.capture_graph,
        GraphBuckets((2, 8)),
        num_pages=PAGES,
        page_size=PAGE,
        spare_pages=(24, 25),
        device="cpu",
    )
    for lengths in ([3] * 8, [3], [2, 2], [1] * 5, [1] * 8):
        batch = decoding(lengths)
        tokens = torch.zeros(len(lengths), dtype=torch.int64)
        assert len(graphs.run(tokens, batch.seq_lens - 1, batch)) == len(lengths)
    assert (recorder.captured, recorder.replayed) == (2, 5)


@pytest.mark.parametrize("case", ["too many sequences", "a prompt", "too long a context"])
def test_what_fits_no_graph_runs_without_one(case: str) -> None:
    recorder = Recorder()
    cache = cache_for(4, 1)
    graphs = DecodeGraphs(
        step_on(cache),
        recorder.capture_graph,
        GraphBuckets((1, 2)),
        num_pages=2,
        page_size=PAGE,
        spare_pages=(12,),
        device="cpu",
    )
    batch = decoding({"too many sequences": [1, 1, 1], "a prompt": [2]}.get(case, [9]))
    tokens = torch.zeros(len(batch.seq_lens), dtype=torch.int64)
    if case == "a prompt":
        batch = AttentionBatch(
            query_starts=torch.tensor([0, 2]),
            seq_lens=batch.seq_lens,
            page_table=batch.page_table,
            slots=torch.tensor([0, 1]),
            max_query_tokens=2,
            max_seq_tokens=2,
        )
        tokens = torch.zeros(2, dtype=torch.int64)
    assert graphs.run(tokens, torch.zeros_like(tokens), batch).isfinite().all()
    assert recorder.captured == 0


def test_every_row_of_padding_has_a_slot_of_its_own() -> None:
    held = GraphBatch(7, 3, PAGE, (30, 31), "cpu")
    slots = held.attention.slots.tolist()
    assert slots == [126, 125, 124, 123, 122, 121, 120]
    assert held.attention.page_table[:, 0].tolist() == [31, 31, 31, 30, 30, 30, 30]
    addresses = [held.attention.slots.data_ptr(), held.attention.page_table.data_ptr()]
    batch = decoding([5, 3])
    held.fill(torch.tensor([1, 2]), torch.tensor([4, 2]), batch)
    assert held.attention.slots.tolist() == [*batch.slots.tolist(), 124, 123, 122, 121, 120]
    assert held.attention.seq_lens.tolist() == [5, 3, 1, 1, 1, 1, 1]
    assert held.attention.max_seq_tokens == 3 * PAGE
    assert addresses == [held.attention.slots.data_ptr(), held.attention.page_table.data_ptr()]


def test_too_few_spare_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 spare pages of 4 slots cannot take the 9 rows"):
        GraphBatch(9, 3, PAGE, (30,), "cpu")


def test_a_batch_that_does_not_fit_is_refused() -> None:
    held = GraphBatch(2, 1, PAGE, (30,), "cpu")
    tokens = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="takes 1 to 2 sequences of one token, got 3 sequences"):
        held.fill(tokens, tokens, decoding([1, 1, 1]))
    with pytest.raises(ConfigError, match="room for 1 pages per sequence got 2"):
        held.fill(tokens[:1], tokens[:1], decoding([5]))


def resolver() -> Resolver:
    device = Device("cuda", "cuda:0", "a GPU", Capability("sm_90", frozenset({"triton"})))
    registry = current_registry(Config(plugins={"interposer-ops", "interposer-cuda"}))
    return Resolver(registry, device, Config(), described=True)


def test_a_kernel_that_waits_for_the_host_is_named() -> None:
    made = resolver()
    site = Site(made, "mlp", torch.float32)
    site.bind_kernel(paged_attention, **facts())
    safe = [choice for choice, _ in made.choices.values()]
    assert judge_choices(safe)
    config = Config(kernels={"fused_experts": "fused_experts_in_turn"})
    registry = current_registry(Config(plugins={"interposer-ops", "interposer-cuda"}))
    waits = Resolver(registry, made.device, config, described=True)
    Site(waits, "mlp", torch.float32).bind_kernel(
        fused_experts, hidden_size=8, intermediate_size=8, num_experts=2, top_k=1, biased=False
    )
    choices = [choice for choice, _ in waits.choices.values()]
    verdict = judge_choices([*safe, *choices])
    assert verdict.reason == (
        "cannot be captured: fused_experts_in_turn of interposer-ops for 'fused_experts' does not "
        "promise to be graph_safe. Try: Config(require={'graph_safe'})"
    )


def facts() -> dict[str, int | float | str | bool]:
    flags = dict.fromkeys(("windowed", "softcapped", "sinks", "alibi", "prefix_lm"), False)
    numbers = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "page_size": 16}
    return {**flags, **numbers, "cache_dtype": "float32"}


def test_a_compiled_step_is_refused() -> None:
    def step() -> torch.Tensor:
        return torch.zeros(1)

    class Step(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.zeros(1)

    assert judge_step(step)
    assert judge_step(Step())
    for compiled in (torch.compile(step, backend="eager"), torch.compile(Step(), backend="eager")):
        assert "is compiled by torch.compile" in judge_step(compiled).reason
