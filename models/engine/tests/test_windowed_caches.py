"""Layers with windows: pages that no token sees any more come back, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import CONFIGS, example, write_checkpoint
from models.tests.family_checkpoints import examples
from models.tests.schedules import REQUESTS
from tests.landing import num_examples
from tests.tape import TapePlatform

from interposer import AttentionBackend, AttentionSpec, Config, KVCacheLayout, explain
from interposer.errors import ConfigError, RequestError
from interposer_engine import LanguageModel, SamplingParams, _planning, load
from interposer_engine._kv_cache import CacheGroup, CacheShape
from interposer_engine._pages import PagePool, window_pages
from interposer_engine._scheduler import Scheduler
from interposer_engine._sequence import TokenSequence
from interposer_models.decoder import ChunkedBackend

MODELS: dict[str, Callable[[], Any]] = {
    "all": CONFIGS["mistral"],
    "some": lambda: example(examples.gemma3, "mixed"),
    "chunks": lambda: example(examples.llama4, "some"),
    "shared": lambda: example(examples.gemma4, "shared"),
}
# Models, and the tokens of their pages.
SPOILED = (("all", 4), ("all", 16), ("some", 2), ("some", 16), ("chunks", 8), ("shared", 4))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of models whose layers see 24 tokens, all or some, or 16 in chunks.

    Of one, half of the layers read caches of others.
    """
    recorded = {}
    for name, config in MODELS.items():
        recorded[name] = tmp_path_factory.mktemp(name)
        write_checkpoint(config(), recorded[name])
    return recorded


def loaded(path: Path, page_size: int = 16, **more: Any) -> LanguageModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_planning, "common_page_size", lambda *_: page_size)
        return load(path, "float32", platform="cpu", **more)


def unwindowed(path: Path) -> LanguageModel:
    """Return a model whose layers keep all pages, as if each saw everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionBackend, "seen_tokens", None)
        patch.setattr(ChunkedBackend, "seen_tokens", None)
        lm = load(path, "float32", platform="cpu", cache_tokens=1024)
    assert len(lm.engine.pools) == 1
    assert lm.engine.pool.seen_tokens is None
    return lm


def spoil(lm: LanguageModel) -> None:
    """Write NaN over every page that no sequence holds, after each step."""
    engine, scheduler = lm.engine, lm.engine.scheduler
    advance = scheduler.advance

    def spoiled(chunks: Any) -> None:
        advance(chunks)
        for cache, backend in zip(engine.runner.caches, engine.runner.backends, strict=True):
            (number,) = (
                i for i, p in enumerate(engine.pools) if p.seen_tokens == backend.seen_tokens
            )
            pool, axis = engine.pools[number], backend.kv_layout().page_axis
            held = {page for s in scheduler.running for page in s.pages[number]}
            free = sorted({*range(pool.num_pages)} - held)
            cache.index_fill_(axis, torch.tensor(free, dtype=torch.int64), torch.nan)
            assert pool.num_free == len(free)

    scheduler.advance = spoiled  # type: ignore[method-assign]


def idle(lm: LanguageModel) -> bool:
    return not lm.engine.busy and all(pool.num_free == pool.num_pages for pool in lm.engine.pools)


@pytest.fixture(scope="module")
def references(paths: dict[str, Path]) -> dict[str, LanguageModel]:
    return {name: unwindowed(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def spoiled(paths: dict[str, Path]) -> dict[tuple[str, int], LanguageModel]:
    """Models with pages of several sizes in caches so small that sequences are preempted."""
    recorded = {}
    for name, size in SPOILED:
        sizes = {"cache_tokens": 144, "max_sequences": 3, "max_step_tokens": 40}
        recorded[name, size] = lm = loaded(paths[name], size, **sizes)
        spoil(lm)
    return recorded


@settings(
    max_examples=num_examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=REQUESTS,
    leaver=st.integers(0, 30),
    spoiled_one=st.sampled_from(SPOILED),
)
def test_any_schedule_gives_the_tokens_of_whole_caches(
    references: dict[str, LanguageModel],
    spoiled: dict[tuple[str, int], LanguageModel],
    requests: list[tuple[int, int, int]],
    leaver: int,
    spoiled_one: tuple[str, int],
) -> None:
    lm, name = spoiled[spoiled_one], spoiled_one[0]
    prompts = [[(7 * i + first) % 256 for i in range(n)] for n, _, first in requests]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for _, n, _ in requests]
    expected = references[name].generate(prompts, params)
    started = []
    for prompt, each, (_, _, pause) in zip(prompts, params, requests, strict=True):
        started.append(lm.engine.add(prompt, each))
        for _ in range(pause):
            lm.engine.step()
    steps = 0
    while lm.engine.busy:
        if steps == leaver:
            lm.engine.cancel(started[0])
        lm.engine.step()
        steps += 1
    for sequence, whole in zip(started, expected, strict=True):
        left = sequence.finish_reason == "cancelled"
        assert sequence.output == list(whole.token_ids)[: len(sequence.output) if left else None]
    assert idle(lm)


@given(st.data())
@settings(max_examples=num_examples(60), suppress_health_check=[HealthCheck.too_slow])
def test_the_pages_of_a_window_belong_to_one_sequence_only(data: st.DataObject) -> None:
    """In pools of all kinds, none larger than it has to be; every request ends."""
    page_size = data.draw(st.sampled_from((1, 2, 3, 8, 16)))
    windows = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=2, unique=True))
    step_tokens, most_sequences = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=6))
    least = max(window_pages(window, page_size) for window in windows)
    pools = [PagePool(least + data.draw(st.integers(0, 20)), page_size, 0, w) for w in windows]
    if data.draw(st.booleans()):
        pools.insert(0, PagePool(-(-max(lengths) // page_size), page_size))
    scheduler = Scheduler(pools, most_sequences, step_tokens)
    for number, length in enumerate(lengths):
        assert all(pool.longest(length) == length for pool in pools)
        pages: list[list[int]] = [[] for _ in pools]
        scheduler.add(TokenSequence(number, [0] * length, SamplingParams(), 0, pages=pages))
    while scheduler.busy:
        chunks = scheduler.next_step()
        assert sum(chunk.num_tokens for chunk in chunks) <= step_tokens
        assert chunks
        for number, pool in enumerate(pools):
            holders = [s.pages[number] for s in scheduler.running]
            held = [page for pages in holders for page in pages if page != pool.zero_page]
            assert len(held) == len({*held}) == pool.num_pages - pool.num_free
            assert all(page < pool.num_pages for page in held)
            for chunk in chunks:
                first = chunk.sequence.num_computed - (pool.seen_tokens or 1000) + 1
                last = chunk.sequence.num_computed + chunk.num_tokens
                seen = chunk.sequence.pages[number][max(0, first) // page_size :]
                assert pool.zero_page not in seen
                assert len(chunk.sequence.pages[number]) == -(-last // page_size)
        scheduler.advance(chunks)
        for chunk in chunks:
            assert chunk.num_tokens > 0
            if chunk.sequence.num_computed == len(chunk.sequence):
                scheduler.remove(chunk.sequence)
    assert all(pool.num_free == pool.num_pages for pool in pools)


@given(st.integers(1, 64), st.integers(1, 90), st.integers(1, 4), st.integers(1, 60), st.data())
def test_a_pool_of_its_full_size_never_runs_out(
    page_size: int, window: int, most_sequences: int, step_tokens: int, data: st.DataObject
) -> None:
    shape = CacheShape.of([Seeing(window)], page_size, most_sequences, step_tokens)
    pool = PagePool(shape.groups[0].num_pages(10**6), page_size, 0, window)
    held, done = [list[int]() for _ in range(most_sequences)], [0] * most_sequences
    for _ in range(6):
        budget, chunks = step_tokens, []
        for number, pages in enumerate(held):
            count = min(budget, data.draw(st.sampled_from((0, 1, 2, page_size + 1, step_tokens))))
            assert pool.extend(pages, done[number] + count)
            budget -= count
            chunks.append(count)
        for number, pages in enumerate(held):
            done[number] += chunks[number]
            pool.trim(pages, done[number])


class Seeing(AttentionBackend):
    """Sees so many tokens; its pages take 24 bytes, or 8 where it sees all."""

    seen_tokens = None

    def __init__(self, seen_tokens: int | None) -> None:
        self.seen_tokens, dtype = seen_tokens, torch.int8
        self.spec = AttentionSpec(
            num_heads=1,
            num_kv_heads=1,
            head_size=8,
            dtype=dtype,
            cache_dtype=dtype,
            page_size=1,
            scale=1.0,
        )

    def kv_layout(self) -> Any:
        pages = 8 if self.seen_tokens is None else 24
        return KVCacheLayout((pages,), 0, (0, 1), torch.int8)

    accepts = plan = forward = None  # type: ignore[assignment]
    __abstractmethods__ = frozenset[str]()


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 3000)), max_size=6),
    st.integers(1, 32),
    st.integers(0, 4),
    st.integers(-50, 10**6),
)
def test_a_cache_has_as_many_pages_as_fit_into_its_memory(
    windows: list[int | None], page_size: int, spare: int, room: int
) -> None:
    shape = CacheShape.of([Seeing(window) for window in windows], page_size, 8, 64, spare)
    fitting = shape.pages_within(room)
    if fitting is None:
        assert shape.num_bytes(10**12) <= max(room, 0)
        assert None not in windows
        return
    assert fitting < 0 or shape.num_bytes(fitting) <= room or fitting == 0 > room
    assert fitting < 0 or shape.num_bytes(fitting + 1) > room


def test_a_model_of_windows_goes_on_beyond_its_cache(
    paths: dict[str, Path], references: dict[str, LanguageModel]
) -> None:
    lm = loaded(paths["all"], 8, cache_tokens=48, max_step_tokens=64)
    pool = lm.engine.pool
    assert (pool.num_pages, lm.engine.runner.max_sequence_tokens) == (6, 512)
    spoil(lm)
    prompt = [(5 * i) % 256 for i in range(200)]
    sequence = lm.engine.add(prompt, SamplingParams(max_new_tokens=200, ignore_eos=True))
    held = []
    while lm.engine.busy:
        lm.engine.step()
        held.append(pool.num_pages - pool.num_free)
    assert max(held[-200:-1]) <= window_pages(24, 8) == 4
    (whole,) = references["all"].generate([prompt], max_new_tokens=200, ignore_eos=True)
    assert sequence.output == list(whole.token_ids)
    assert idle(lm)
    with pytest.raises(RequestError, match="needs 25 cached tokens, the cache holds 24"):
        loaded(paths["all"], 8, cache_tokens=24).engine.add(
            [1] * 20, SamplingParams(max_new_tokens=5)
        )


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_of_a_long_text_are_computed_in_parts(
    paths: dict[str, Path], references: dict[str, LanguageModel], name: str
) -> None:
    lm = loaded(paths[name], 8, cache_tokens=200, max_sequences=1, max_step_tokens=8)
    assert max(pool.num_pages for pool in lm.engine.pools[-1:]) < 25
    tokens = [(3 * i) % 256 for i in range(190)]
    expected = references[name].logits(tokens)
    torch.testing.assert_close(lm.logits(tokens), expected, atol=1e-4, rtol=1e-4)
    assert idle(lm)


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "rules",
    [
        {"attention": {"decoder": "sdpa"}},
        {"attention": {"decoder": "paged"}, "kernels": {"paged_attention": "reference"}},
        {"attention": {"decoder": "paged"}, "kernels": {"paged_attention": "paged_attention_sdpa"}},
    ],
    ids=str,
)
def test_no_backend_reads_freed_pages(
    paths: dict[str, Path], references: dict[str, LanguageModel], rules: dict[str, Any]
) -> None:
    lm = loaded(paths["some"], 4, config=Config(**rules), max_step_tokens=40, max_sequences=2)
    spoil(lm)
    prompts = [[(5 * i) % 256 for i in range(100)], [7] * 30]
    expected = references["some"].generate(prompts, max_new_tokens=20, ignore_eos=True)
    actual = lm.generate(prompts, max_new_tokens=20, ignore_eos=True)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert idle(lm)


@pytest.mark.landing(1)
@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_graphs_have_pages_of_every_pool(
    paths: dict[str, Path], references: dict[str, LanguageModel], name: str
) -> None:
    plugins = ("interposer-models", "interposer-ops", "interposer-quantization")
    config = Config(graphs="on", platform="tape", plugins=plugins, require={"graph_safe"})
    lm = load(paths[name], config=config, cache_tokens=320, max_sequences=3, max_step_tokens=40)
    spoil(lm)
    prompts, counts = [[3] * 70, [2, 7, 1], [5] * 30], (40, 9, 20)
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in counts]
    expected, actual = (each.generate(prompts, params) for each in (references[name], lm))
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert TapePlatform.replayed > 30
    assert idle(lm)


def test_the_budget_counts_each_pool(paths: dict[str, Path]) -> None:
    sizes = {"max_sequences": 2, "max_step_tokens": 32}
    lm = loaded(paths["some"], 8, cache_tokens=1000, **sizes)
    shape = CacheShape.of(lm.engine.runner.backends, 8, **sizes)
    assert [(g.num_layers, g.seen_tokens) for g in shape.groups] == [(1, None), (5, 24)]
    assert [pool.num_pages for pool in lm.engine.pools] == [125, 2 * 5 + 4]
    assert lm.engine.runner.cache_bytes == shape.num_bytes(125)
    page = 8 * 2 * 2 * 16 * 4  # keys and values of 8 tokens, 2 heads of 16 floats
    assert lm.engine.runner.cache_bytes == page * (125 + 5 * (14 + 1))
    (note,) = (n for n in explain(lm).notes if n.startswith("KV cache"))
    assert "(1000 in 1 full-attention layer, 112 in 5 layers with a window of 24)" in note
    # The bytes of 100 tokens of all layers hold four times as many.
    assert shape.pages_within(100 * 6 * page) == 100 * 6 - 75
    whole = CacheGroup(None, 6, 6 * page, None)
    assert CacheShape([whole], 8).pages_within(100 * 6 * page) == 100
    with pytest.raises(ConfigError, match="the free memory holds"):
        loaded(paths["some"], cache_tokens=10**13)
    # Windows everywhere: contexts are of any length in the same memory.
    lm = loaded(paths["all"], 8, cache_tokens=10**13, **sizes)
    assert lm.engine.pool.num_pages == 14
