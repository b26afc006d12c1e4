"""What sequences share, told apart token by token in memory that holds digests in place of keys."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer.errors import ConfigError
from interposer_engine import SamplingParams
from interposer_engine._pages import (
    CacheContents,
    StateCheckpoints,
    copy_rows,
    row_bytes,
    window_pages,
)
from interposer_engine._prefix_cache import SharedPrefixes
from interposer_engine._prefix_pool import PrefixPool, PrefixStore, host_memory
from interposer_engine._scheduler import Chunk, Scheduler
from interposer_engine._sequence import TokenSequence

GARBAGE = -1
VOCABULARY = 3


def digest(sequence: TokenSequence, count: int) -> int:
    """Return a number that stands for all that is computed from the first tokens."""
    return hash((sequence.adapter, *sequence.tokens(0, count)))


@dataclass
class Machine:
    """An engine whose layers store a digest for each token, and check those that they see.

    Attributes:
        stored: eighths of the cache, for which there is a store.
        computed: tokens of each step.
    """

    page_size: int = 4
    windows: Sequence[int | None] = (None,)
    num_pages: Sequence[int] = (64,)
    max_sequences: int = 8
    max_step_tokens: int = 64
    num_checkpoints: int = 0
    stored: int = 0
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        size, slots = self.page_size, self.max_sequences if self.num_checkpoints else 0
        self.pools = [
            PrefixPool(count, size, 0 if place else slots, seen)
            for place, (count, seen) in enumerate(zip(self.num_pages, self.windows, strict=True))
        ]
        self.caches = [torch.full((pool.num_pages + 1, size), GARBAGE) for pool in self.pools]
        for cache in self.caches:
            cache[-1] = 0  # the page of zeros
        self.states = [(torch.full((slots,), GARBAGE), torch.zeros(slots, 2, dtype=torch.int8))]
        contents = CacheContents([[(c, 0)] for c in self.caches], self.states)
        kinds = [(contents.page_bytes(place), p.num_pages) for place, p in enumerate(self.pools)]
        checkpoints = None
        if count := self.num_checkpoints:
            kept = [(torch.full((count,), GARBAGE), torch.zeros(count, 2, dtype=torch.int8))]
            checkpoints = StateCheckpoints(self.states, kept, count)
            kinds.append((row_bytes(kept), count))
        store = None
        if self.stored:
            total = sum(max(each, 64) * count for each, count in kinds)
            least = max(-(-total // count) for _, count in kinds) + 64 * len(kinds)
            num_bytes = max(least, self.stored * total // 8)
            memory = torch.full((num_bytes,), 3, dtype=torch.uint8)
            store = PrefixStore(memory, kinds, queued=False)
        self.shared = SharedPrefixes(self.pools, contents, checkpoints, store)
        sizes = self.max_sequences, self.max_step_tokens
        self.scheduler = Scheduler(self.pools, *sizes, prefixes=self.shared)
        self.ids = iter(range(10**6))

    def add(
        self, prompt: Sequence[int], more: int = 1, adapter: int | None = None
    ) -> TokenSequence:
        params = SamplingParams(max_new_tokens=more)
        pages: list[list[int]] = [[] for _ in self.pools]
        sequence = TokenSequence(next(self.ids), [*prompt], params, 0, pages=pages, adapter=adapter)
        self.scheduler.add(sequence)
        return sequence

    def step(self, guesses: int = 0) -> None:
        chunks = self.scheduler.next_step()
        assert bool(chunks) == self.scheduler.busy
        if guesses and all(chunk.is_last and chunk.num_tokens == 1 for chunk in chunks):
            chunks = [self._guessing(chunk, guesses) for chunk in chunks]
        for chunk in chunks:
            self._compute(chunk)
        self.computed.append(sum(chunk.num_rows for chunk in chunks))
        self.scheduler.advance(chunks)
        for chunk in chunks:
            if chunk.is_last or chunk.sequence.num_computed == len(chunk.sequence):
                self._append(chunk)
        held = [
            {page for s in self.scheduler.running for page in s.pages[place]}
            for place in range(len(self.pools))
        ]
        for pool, cache, own in zip(self.pools, self.caches, held, strict=True):
            known = {page for page in range(pool.num_pages) if page in pool._keys}
            unused = [*{*range(pool.num_pages)} - own - known]
            cache[unused] = GARBAGE
            assert pool.num_free == pool.num_pages - len(own - {pool.zero_page})

    def run(self) -> None:
        while self.scheduler.busy:
            self.step()

    def idle(self) -> bool:
        return not self.scheduler.busy and all(p.num_free == p.num_pages for p in self.pools)

    def next_token(self, sequence: TokenSequence) -> int:
        return digest(sequence, len(sequence)) % VOCABULARY

    def _guessing(self, chunk: Chunk, count: int) -> Chunk:
        sequence = chunk.sequence
        count = min(count, sequence.params.max_new_tokens - len(sequence.output) - 1)
        if count > 0 and self.scheduler.extend(sequence, len(sequence) + count):
            return Chunk(sequence, 1, (0,) * count)
        return chunk

    def _compute(self, chunk: Chunk) -> None:
        sequence, first = chunk.sequence, chunk.sequence.num_computed
        last, size = first + chunk.num_tokens, self.page_size
        for pool, cache, pages in zip(self.pools, self.caches, sequence.pages, strict=True):
            seen = first if pool.seen_tokens is None else pool.seen_tokens - 1
            for place in range(max(0, first - seen), first):
                assert cache[pages[place // size], place % size] == digest(sequence, place + 1)
            for place in range(first, last):
                assert pages[place // size] < pool.num_pages
                cache[pages[place // size], place % size] = digest(sequence, place + 1)
            for place in range(last, last + len(chunk.drafts)):
                cache[pages[place // size], place % size] = GARBAGE
        if self.num_checkpoints:
            state = self.states[0][0][sequence.state_slot]
            assert not first or state == digest(sequence, first)
            state.fill_(GARBAGE if chunk.drafts else digest(sequence, last))

    def _append(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        sequence.output.append(self.next_token(sequence))
        accepted = 0
        for guess in chunk.drafts:
            if guess != sequence.output[-1]:
                break
            sequence.output.append(self.next_token(sequence))
            accepted += 1
        if len(sequence.output) >= sequence.params.max_new_tokens:
            sequence.finish_reason = "length"
            self.scheduler.remove(sequence)
            return
        if chunk.drafts:
            for place in range(sequence.num_computed, sequence.num_computed + accepted):
                for cache, pages in zip(self.caches, sequence.pages, strict=True):
                    page, offset = divmod(place, self.page_size)
                    cache[pages[page], offset] = digest(sequence, place + 1)
            self.scheduler.accept(chunk, accepted)
            if self.num_checkpoints:  # as whoever guesses with states has to
                self.states[0][0][sequence.state_slot] = digest(sequence, sequence.num_computed)


@st.composite
def machines(draw: Any) -> Machine:
    size = draw(st.sampled_from((1, 2, 3, 8)))
    windows: list[int | None] = [*draw(st.sampled_from(((None,), (None, 5), (7,), (9, 3))))]
    step, most = draw(st.sampled_from((5, 16, 64))), draw(st.integers(1, 4))
    room = draw(st.sampled_from((52, 64, 200)))
    pages = [
        -(-room // size)
        if seen is None
        else most * (window_pages(seen, size) + 1) + step // size + draw(st.integers(0, 8))
        for seen in windows
    ]
    return Machine(
        size,
        windows,
        pages,
        most,
        step,
        num_checkpoints=draw(st.sampled_from((0, 1, 3, 20))),
        stored=draw(st.sampled_from((0, 4, 16))),
    )


PROMPTS = st.tuples(
    st.integers(0, 2), st.integers(0, 36), st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
)
"""A beginning, how much of it, and an end."""


@settings(
    max_examples=num_examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(machine=machines(), data=st.data())
def test_every_token_sees_the_same_as_without_sharing(
    machine: Machine, data: st.DataObject
) -> None:
    """Under joins, leaves, preemption, guesses, in pools of all kinds, with states and a store."""
    started: list[TokenSequence] = []
    for _ in range(data.draw(st.integers(1, 7))):
        beginning, count, end = data.draw(PROMPTS)
        prompt = [random.Random(beginning).randrange(VOCABULARY)] * 2
        prompt += [random.Random(f"{beginning} {n}").randrange(VOCABULARY) for n in range(count)]
        adapter = data.draw(st.sampled_from((None, None, 0)))
        counts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        started += [machine.add(prompt + end, more, adapter) for more in counts]
        guesses = data.draw(st.sampled_from((0, 0, 2)))
        for _ in range(data.draw(st.integers(0, 9))):
            machine.step(guesses)
        if data.draw(st.integers(0, 3)) == 0:
            leaver = data.draw(st.sampled_from(started))
            if leaver.finish_reason is None:
                leaver.finish_reason = "cancelled"
                machine.scheduler.remove(leaver)
    machine.run()
    assert machine.idle()
    for sequence in started:
        alone = TokenSequence(0, [*sequence.prompt], sequence.params, 0, adapter=sequence.adapter)
        for token in sequence.output:
            assert token == machine.next_token(alone)
            alone.output.append(token)
        left = sequence.finish_reason == "cancelled"
        assert left or len(sequence.output) == sequence.params.max_new_tokens


def tokens(count: int, seed: int) -> list[int]:
    return [random.Random(f"{seed} {place}").randrange(10**9) for place in range(count)]


KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "windows": {"windows": (None, 12), "num_pages": (64, 40)},
    "only windows": {"windows": (12,), "num_pages": (40,)},
    "states": {"num_checkpoints": 40},
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_prompts_that_arrive_together_are_computed_once(kind: str) -> None:
    machine = Machine(**KINDS[kind], max_step_tokens=400)
    for _ in range(8):
        machine.add(tokens(43, 1))
    machine.run()
    # The state is kept at the end of a page, behind which 3 tokens follow.
    rest = 3 if kind == "states" else 1
    assert sum(machine.computed) == 43 + 7 * rest
    assert machine.shared.statistics.shared_tokens == 7 * (43 - rest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_prefix_of_prompts_that_arrive_together_is_computed_once(kind: str) -> None:
    machine = Machine(**KINDS[kind], max_step_tokens=30)
    for seed in range(2, 8):
        machine.add(tokens(50, 1) + tokens(9, seed))
    machine.run()
    # States are kept at the ends of pages.
    assert sum(machine.computed) == 59 + 5 * (59 - (48 if kind == "states" else 50))
    assert machine.idle()


def test_a_waiting_sequence_continues_when_the_awaited_one_ends() -> None:
    machine = Machine(max_step_tokens=16)
    first, second = (machine.add(tokens(60, 1)) for _ in range(2))
    machine.step()
    assert (first.num_computed, second.num_computed) == (16, 0)
    machine.scheduler.remove(first)
    machine.step()
    assert second.num_shared == 16
    machine.run()
    assert sum(machine.computed) == 60


def test_a_match_may_end_within_a_page() -> None:
    machine = Machine(page_size=16)
    machine.add(tokens(40, 1), 3)
    machine.run()
    cases = ((40, 39), (39, 38), (33, 32), (20, 19), (5, 4))
    for count, shared in cases:
        sequence = machine.add(tokens(count, 1))
        machine.run()
        assert sequence.num_shared == shared
    other = machine.add(tokens(27, 1) + tokens(9, 2))
    machine.run()
    assert other.num_shared == 27
    # Of two pages behind the same one, the one that agrees farther.
    again = machine.add([*tokens(27, 1), *tokens(6, 2), 300])
    machine.run()
    assert again.num_shared == 33
    # One that runs lends its last page, too.
    machine.shared.forget()
    first = machine.add(tokens(40, 1), 20)
    machine.step()
    second = machine.add(tokens(38, 1) + tokens(9, 2))
    machine.step()
    assert second.num_shared == 38
    machine.run()
    assert len(first.output) == 20


def test_the_state_after_an_answer_is_cached() -> None:
    machine = Machine(num_checkpoints=20)
    first = machine.add(tokens(30, 1), 12)
    machine.run()
    second = machine.add([*first.prompt, *first.output, 5, 6])
    machine.run()
    assert second.num_shared == 30 + 12 - 1  # the last token of the answer was never computed


def test_a_state_that_includes_draft_tokens_is_not_cached() -> None:
    machine = Machine(num_checkpoints=20)
    first = machine.add(tokens(30, 1), 6)
    while machine.scheduler.busy:
        machine.step(guesses=2)
    for count in range(1, 7):
        machine.add([*first.prompt, *first.output[:count], 5])
        machine.run()


def test_a_sequence_with_a_new_end_computes_at_most_about_twice_the_end() -> None:
    machine = Machine(page_size=16, num_pages=(400,), num_checkpoints=99, max_step_tokens=4000)
    prompt = tokens(1200, 1)
    machine.add(prompt)
    machine.run()
    assert len(machine.computed) <= 8
    for end in (1, 20, 60, 200, 500):
        sequence = machine.add(prompt[:-end] + tokens(end, 2 + end))
        machine.run()
        assert sequence.num_shared >= 1200 - max(64, 2 * end) - 16
    # The pages of the last one agreed farther than a state was kept: there is one now.
    third = machine.add(prompt[:-500] + tokens(500, 1))
    machine.run()
    assert third.num_shared == 700 // 16 * 16


def test_a_prefix_is_shared_only_if_all_window_pages_are_cached() -> None:
    machine = Machine(windows=(None, 12), num_pages=(64, 12), max_sequences=2, max_step_tokens=24)
    machine.add(tokens(100, 1))
    machine.run()
    # The small pool has the last window still, and not that of the middle.
    assert machine.pools[1].num_evicted > 0
    for count, shared in ((100, 99), (40, 0), (100, 99)):
        sequence = machine.add([*tokens(count, 1)[:-1], 300])
        machine.step()
        assert sequence.num_shared == shared
        machine.scheduler.remove(sequence)


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_pages_are_restored_from_the_store(kind: str) -> None:
    sizes = {"num_pages": tuple(32 for _ in KINDS[kind].get("num_pages", (1,)))}
    if kind == "states":
        sizes["num_checkpoints"] = 2  # type: ignore[assignment]
    recorded = []
    for rows in (0, 64):
        machine = Machine(**{**KINDS[kind], **sizes}, stored=rows, max_sequences=1)
        for _ in range(2):
            for seed in range(3):
                sequence = machine.add(tokens(103, seed))
                machine.run()
        recorded.append(sequence.num_shared)
        counts = machine.shared.statistics
    assert recorded[0] == 0
    assert recorded[1] >= 100
    assert 0 < counts.restored_pages <= counts.stored_pages <= counts.evicted_pages
    assert f"of which {counts.stored_pages} were stored" in str(counts)
    restored = counts.restored_pages
    machine.add(tokens(103, 2))
    machine.run()
    assert counts.restored_pages == restored  # it is known on the device again
    machine.shared.forget()
    again = machine.add(tokens(103, 2))
    machine.run()
    assert again.num_shared == 0


def test_the_oldest_and_last_pages_are_evicted_first() -> None:
    machine = Machine(page_size=16, num_pages=(6,))

    def begun(seed: int, count: int) -> TokenSequence:
        sequence = machine.add(tokens(count, seed))
        machine.step()
        return sequence

    begun(1, 33)  # three pages
    begun(2, 17)  # and two
    assert machine.pools[0].num_free == 6
    begun(3, 64)  # four: one that holds nothing, and the last ones of the first
    assert machine.shared.statistics.evicted_pages == 3
    assert begun(2, 17).num_shared == 16
    assert begun(1, 33).num_shared == 0


def test_an_adapter_has_prefixes_of_its_own() -> None:
    machine, recorded = Machine(), []
    for adapter in (None, 0, 1, 0):
        sequence = machine.add(tokens(40, 1), adapter=adapter)
        machine.run()
        recorded.append(sequence.num_shared)
    assert recorded == [0, 0, 0, 39]


def test_rows_of_states_are_copied_from_slots_to_slots() -> None:
    states = [(torch.arange(12).view(4, 3), torch.arange(4.0)), (torch.arange(8).view(4, 2),)]
    rows = [part.clone() for layer in states for part in layer]
    copy_rows(states, [0, 1], states, [1, 2])
    copy_rows(states, [3], states, [0])
    copy_rows(states, [], states, [])
    for part, before in zip((part for layer in states for part in layer), rows, strict=True):
        assert part.tolist() == before[[3, 0, 1, 3]].tolist()


def test_a_store_holds_at_least_one_row_of_each_kind() -> None:
    with pytest.raises(ConfigError, match="offload_bytes is 100, which holds no page") as caught:
        PrefixStore(torch.zeros(100, dtype=torch.uint8), [(640, 10), (64, 3)], queued=False)
    least = int(str(caught.value).split("Try: ")[1].split()[0])
    store = PrefixStore(torch.zeros(least, dtype=torch.uint8), [(640, 10), (64, 3)], queued=False)
    for kind in (0, 1):
        assert store.put(kind, b"one", [torch.tensor([7])], frozenset())
        assert not store.kinds[kind].has_key(b"two")
        filled = 0
        while store.put(kind, b"%d" % filled, [torch.tensor([filled])], frozenset((b"one",))):
            filled += 1
            if filled > 20:
                break
        back = torch.zeros(1, dtype=torch.int64)
        store.get(kind, b"one", [back])
        assert back == 7


def test_host_memory_is_page_locked_where_the_platform_can() -> None:
    class Locking:
        def __init__(self, provides: bool) -> None:
            self.provides = lambda member: provides and member == "pin_memory"
            self.pin_memory = torch.Tensor.clone

    locked, plain = (host_memory(640, Locking(can)) for can in (True, False))  # type: ignore[arg-type]
    for memory in (locked, plain):
        store = PrefixStore(memory, [(64, 4)], queued=True)
        part, back = torch.arange(16.0).view(4, 4).T, torch.zeros(4, 4)
        assert store.put(0, b"one", [part], frozenset())
        store.get(0, b"one", [back])
        assert torch.equal(back, part)
