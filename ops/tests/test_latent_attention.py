"""Attention to latent vectors, and the choice of those that are attended to, in other words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch.nn import functional

from interposer_ops.attention import indexer_scores, indexer_topk
from interposer_ops.attention._sparse_attention_cases import indexer_topk_cases
from interposer_ops.latent_attention import latent_attention_decode, sparse_latent_attention

few = settings(max_examples=num_examples(40))
SCALE = 0.7


@dataclass(frozen=True)
class Batch:
    """Sequences as (tokens in the cache, tokens of the query) over shuffled pages.

    ``stored`` holds a row for every cached token of each sequence; slots without one are NaN.
    """

    sequences: tuple[tuple[int, int], ...]
    page_size: int
    stored: tuple[torch.Tensor, ...]
    seed: int

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self.sequences)

    def numbers(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def table(self) -> torch.Tensor:
        longest = max(-(-length // self.page_size) for length, _ in self.sequences)
        count = len(self.sequences) * longest
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(count, generator=generator).view(len(self.sequences), longest)

    def paged(self, columns: tuple[torch.Tensor, ...]) -> torch.Tensor:
        table = self.table()
        shape = (table.numel(), self.page_size, *columns[0].shape[1:])
        cache = torch.full(shape, torch.nan, dtype=torch.float64)
        for pages, rows in zip(table, columns, strict=True):
            for position, row in enumerate(rows):
                cache[pages[position // self.page_size], position % self.page_size] = row
        return cache

    def lengths(self) -> dict[str, torch.Tensor]:
        return {
            "page_table": self.table(),
            "query_starts": torch.tensor([0, *(n for _, n in self.sequences)]).cumsum(0),
            "seq_lens": torch.tensor([n for n, _ in self.sequences]),
        }

    def tokens(self) -> list[tuple[int, int]]:
        """Return the sequence and the position of every token of the query."""
        return [
            (number, length - queries + row)
            for number, (length, queries) in enumerate(self.sequences)
            for row in range(queries)
        ]


@st.composite
def batches(draw: st.DrawFn, width: int) -> Batch:
    sequences = tuple(
        (length, draw(st.integers(1, length)))
        for length in draw(st.lists(st.integers(1, 10), min_size=1, max_size=3))
    )
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    stored = tuple(
        torch.randn(length, width, generator=generator, dtype=torch.float64)
        for length, _ in sequences
    )
    return Batch(sequences, draw(st.integers(1, 5)), stored, seed)


def attended(query: torch.Tensor, rows: torch.Tensor, latent_size: int) -> torch.Tensor:
    """Return attention of ``[N, C + R]`` to ``[L, C + R]``, by torch."""
    keys = rows.expand(query.shape[0], -1, -1)
    values = keys[..., :latent_size]
    out = functional.scaled_dot_product_attention(query[:, None], keys, values, scale=SCALE)
    return out[:, 0]


@few
@given(batches(7), st.integers(1, 7), st.integers(1, 4), st.sampled_from([None, 0.5, 3.0]))
def test_decoding_matches_torch_attention(
    batch: Batch, latent_size: int, heads: int, factor: float | None
) -> None:
    query = batch.numbers(batch.num_tokens, heads, 7)
    actual = latent_attention_decode(
        query,
        batch.paged(batch.stored),
        **batch.lengths(),
        max_query_tokens=max(tokens for _, tokens in batch.sequences),
        latent_size=latent_size,
        scale=SCALE,
        cache_scale=None if factor is None else torch.tensor([factor], dtype=torch.float64),
    )
    for token, (number, position) in enumerate(batch.tokens()):
        rows = batch.stored[number][: position + 1] * (1.0 if factor is None else factor)
        torch.testing.assert_close(actual[token], attended(query[token], rows, latent_size))


def test_absorbed_projections_match_separate_keys_and_values() -> None:
    """Keys and values made of the latent vector, per head, against the vector itself."""
    generator = torch.Generator().manual_seed(0)
    heads, latent_size, rotary_size, head_size, value_size, length = 3, 8, 4, 6, 5, 9

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    latent, rotary = numbers(length, latent_size), numbers(length, rotary_size)
    to_key, to_value = (
        numbers(heads, latent_size, head_size),
        numbers(heads, latent_size, value_size),
    )
    plain, turned = numbers(1, heads, head_size), numbers(1, heads, rotary_size)
    keys = torch.cat(
        (torch.einsum("lc,ncd->nld", latent, to_key), rotary.expand(heads, -1, -1)), -1
    )
    values = torch.einsum("lc,nce->nle", latent, to_value)
    query = torch.cat((plain, turned), -1)
    expected = functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys, values, scale=SCALE
    )
    actual = latent_attention_decode(
        torch.cat((torch.einsum("tnd,ncd->tnc", plain, to_key), turned), -1),
        torch.cat((latent, rotary), -1)[None],
        torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([0, 1]),
        torch.tensor([length]),
        1,
        latent_size,
        SCALE,
    )
    up = torch.einsum("tnc,nce->nte", actual, to_value)
    torch.testing.assert_close(up, expected)


@few
@given(batches(6), st.data())
def test_sparse_attention_matches_torch_attention_to_the_listed_vectors(
    batch: Batch, data: st.DataObject
) -> None:
    query, tokens = batch.numbers(batch.num_tokens, 3, 6), batch.tokens()
    lists = [
        data.draw(st.lists(st.integers(0, position), unique=True, max_size=5))
        for _, position in tokens
    ]
    rows = [
        data.draw(st.permutations([*positions, *[-1] * (5 - len(positions))]))
        for positions in lists
    ]
    actual = sparse_latent_attention(
        query,
        batch.paged(batch.stored),
        batch.table(),
        torch.tensor([number for number, _ in tokens]),
        torch.tensor(rows, dtype=torch.int32),
        4,
        SCALE,
    )
    for token, (number, _) in enumerate(tokens):
        if lists[token]:
            expected = attended(query[token], batch.stored[number][lists[token]], 4)
            torch.testing.assert_close(actual[token], expected)
        else:
            assert not actual[token].any()


@few
@given(batches(5), st.integers(1, 3), st.booleans())
def test_indexer_scores_match_their_definition(batch: Batch, heads: int, scaled: bool) -> None:
    query, weights = (
        batch.numbers(batch.num_tokens, heads, 5),
        batch.numbers(batch.num_tokens, heads),
    )
    scales = tuple(rows[:, 0].abs() for rows in batch.stored)
    longest = max(length for length, _ in batch.sequences)
    actual = indexer_scores(
        query,
        batch.paged(batch.stored),
        weights,
        **batch.lengths(),
        max_seq_tokens=longest + 1,
        key_scales=batch.paged(scales) if scaled else None,
    )
    for token, (number, position) in enumerate(batch.tokens()):
        for key in range(longest + 1):
            if key > position:
                assert float(actual[token, key]) == -torch.inf
                continue
            factor = float(scales[number][key]) if scaled else 1.0
            products = [
                max(0.0, float(query[token, head] @ batch.stored[number][key]))
                for head in range(heads)
            ]
            score = factor * sum(
                float(w) * p for w, p in zip(weights[token], products, strict=True)
            )
            assert float(actual[token, key]) == pytest.approx(score)


@given(
    st.lists(
        st.lists(st.one_of(st.just(-torch.inf), st.integers(-99, 99).map(float)), min_size=4),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 12),
)
def test_topk_matches_sorting(drawn: list[list[float]], top_k: int) -> None:
    width = min(len(row) for row in drawn)
    # A fraction of its own for every place, so that no two scores are equal.
    rows = [[score + place / 256 for place, score in enumerate(row[:width])] for row in drawn]
    actual = indexer_topk(torch.tensor(rows), top_k)
    assert actual.dtype == torch.int32
    for row, chosen in zip(rows, actual.tolist(), strict=True):
        visible = [place for place in range(width) if row[place] != -torch.inf]
        best = sorted(visible, key=lambda place: -row[place])[:top_k]
        assert chosen == [*sorted(best), *[-1] * (top_k - len(best))]


def test_ties_within_the_choice_are_kept() -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0, 2.0]])
    assert indexer_topk(scores, 3).tolist() == [[1, 2, 3]]
    assert indexer_topk(scores, 4).tolist() == [[1, 2, 3, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cases_have_one_right_choice(dtype: torch.dtype) -> None:
    """No score that is left out equals the smallest that is chosen."""
    repeated = 0
    for case in indexer_topk_cases(dtype, 0):
        scores, top_k = case.arguments["scores"], case.arguments["top_k"]
        if not len(scores) or top_k >= scores.shape[1]:
            continue
        values = scores.sort(-1, descending=True).values.double()
        open_rows = (values[:, top_k - 1] == values[:, top_k]) & values[:, top_k].isfinite()
        assert not open_rows.any(), case.label
        repeated += int((values[:, :top_k].diff() == 0).any())
    assert repeated


@few
@given(batches(8), st.integers(1, 12))
def test_sparse_attention_to_all_tokens_equals_dense_attention(batch: Batch, spare: int) -> None:
    """The three ops in a row, where as many tokens are chosen as there are."""
    longest = max(length for length, _ in batch.sequences)
    arguments: dict[str, Any] = batch.lengths()
    cache, query = batch.paged(batch.stored), batch.numbers(batch.num_tokens, 2, 8)
    scores = indexer_scores(query, cache, query[..., 0], **arguments, max_seq_tokens=longest)
    sequences = torch.tensor([number for number, _ in batch.tokens()])
    sparse = sparse_latent_attention(
        query,
        cache,
        arguments["page_table"],
        sequences,
        indexer_topk(scores, longest + spare),
        6,
        SCALE,
    )
    longest_query = max(tokens for _, tokens in batch.sequences)
    dense = latent_attention_decode(
        query, cache, **arguments, max_query_tokens=longest_query, latent_size=6, scale=SCALE
    )
    torch.testing.assert_close(sparse, dense)
