from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.caches import gather_cache, reshape_and_cache

Shape = tuple[int, int, int, int]


@st.composite
def writes(draw: st.DrawFn) -> tuple[Shape, list[int], int]:
    """Return the shape of a cache, distinct slots in any order, and a seed."""
    shape = tuple(draw(st.integers(1, 5)) for _ in range(4))
    num_slots = shape[0] * shape[1]
    slots = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=num_slots))
    return shape, slots, draw(st.integers(0, 1000))  # type: ignore[return-value]


def step(shape: Shape, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, num_tokens, *shape[2:], generator=generator).unbind()
    return key, value


def empty(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full(shape, torch.nan), torch.full(shape, torch.nan)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


@given(writes())
def test_each_token_lands_in_its_slot_and_nothing_else_changes(
    write: tuple[Shape, list[int], int],
) -> None:
    shape, slots, seed = write
    key, value = step(shape, len(slots), seed)
    keys, values = empty(shape)
    reshape_and_cache(key, value, keys, values, torch.tensor(slots, dtype=torch.int64))
    for slot in range(shape[0] * shape[1]):
        stored = keys[slot // shape[1], slot % shape[1]], values[slot // shape[1], slot % shape[1]]
        if slot in slots:
            token = slots.index(slot)
            assert torch.equal(stored[0], key[token])
            assert torch.equal(stored[1], value[token])
        else:
            assert stored[0].isnan().all()
            assert stored[1].isnan().all()


@given(writes(), st.integers(0, 30))
def test_writing_in_chunks_equals_writing_at_once(
    write: tuple[Shape, list[int], int], cut: int
) -> None:
    shape, slots, seed = write
    key, value = step(shape, len(slots), seed)
    places = torch.tensor(slots, dtype=torch.int64)
    at_once, chunked = empty(shape), empty(shape)
    reshape_and_cache(key, value, *at_once, places)
    for part in (slice(0, cut), slice(cut, None)):
        reshape_and_cache(key[part], value[part], *chunked, places[part])
    assert same(at_once[0], chunked[0])
    assert same(at_once[1], chunked[1])


@given(writes())
def test_the_order_of_tokens_does_not_matter(write: tuple[Shape, list[int], int]) -> None:
    shape, slots, seed = write
    key, value = step(shape, len(slots), seed)
    places = torch.tensor(slots, dtype=torch.int64)
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))
    forward, shuffled = empty(shape), empty(shape)
    reshape_and_cache(key, value, *forward, places)
    reshape_and_cache(key[order], value[order], *shuffled, places[order])
    assert same(forward[0], shuffled[0])
    assert same(forward[1], shuffled[1])


def test_a_cache_need_not_be_contiguous() -> None:
    cache = torch.zeros(3, 2, 4, 1, 5)  # [P, 2, S, K, D]
    key, value = step((3, 4, 1, 5), 2, 0)
    keys, values = cache.unbind(1)
    reshape_and_cache(key, value, keys, values, torch.tensor([11, 0]))
    assert torch.equal(cache[2, 0, 3], key[0])
    assert torch.equal(cache[0, 1, 0], value[1])
    assert int(cache.count_nonzero()) == 20


@st.composite
def chunks(draw: st.DrawFn) -> tuple[Shape, list[tuple[int, int]], int]:
    """Return the shape of a cache, (first position, tokens) of sequences, and rows to spare."""
    page_size, kv_heads, head_size = (draw(st.integers(1, 5)) for _ in range(3))
    sequences = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)
    )
    num_pages = sum(-(-(start + length) // page_size) for start, length in sequences) + 1
    return (num_pages, page_size, kv_heads, head_size), sequences, draw(st.integers(0, 3))


def tables(shape: Shape, totals: list[int], seed: int) -> list[torch.Tensor]:
    """Return shuffled pages for sequences of ``totals`` tokens."""
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
    return list(order.split([-(-n // shape[1]) for n in totals] + [1]))[:-1]


@given(chunks(), st.integers(0, 100))
def test_written_tokens_are_gathered(
    drawn: tuple[Shape, list[tuple[int, int]], int], seed: int
) -> None:
    shape, sequences, spare = drawn
    pages = tables(shape, [start + length for start, length in sequences], seed)
    table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
    cache, unused = empty(shape)
    expected = []
    for row, (start, length) in enumerate(sequences):
        key, _ = step(shape, start + length, seed + row)
        positions = torch.arange(start + length)
        if len(positions):
            slots = table[row, positions // shape[1]] * shape[1] + positions % shape[1]
            reshape_and_cache(key, key, cache, unused, slots)
        expected.append(key[start:])
    expected.append(torch.zeros(spare, *shape[2:]))
    starts, lengths = (torch.tensor(column) for column in zip(*sequences, strict=True))
    actual = gather_cache(cache, table, lengths, starts, int(lengths.sum()) + spare)
    assert torch.equal(actual, torch.cat(expected))
