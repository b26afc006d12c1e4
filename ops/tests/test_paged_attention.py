"""The reference of paged attention against other formulations, and what must hold of any."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch.nn import functional

from interposer_ops.attention import paged_attention

few = settings(max_examples=num_examples(40))


@dataclass(frozen=True)
class Batch:
    """Sequences over a paged cache, and how they are attended to.

    ``sequences`` holds (tokens in the cache, tokens of the query); ``keys`` and ``values`` hold
    ``[L, K, D]`` of each sequence, ``queries`` ``[Q, N, D]``, ``prefixes`` a number of tokens.
    """

    sequences: tuple[tuple[int, int], ...]
    page_size: int
    queries: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    prefixes: tuple[int, ...] | None
    options: dict[str, Any]

    def attend(self, page_seed: int = 0) -> list[torch.Tensor]:
        """Return the output of each sequence; ``page_seed`` decides where pages lie."""
        counts = [-(-length // self.page_size) for length, _ in self.sequences]
        generator = torch.Generator().manual_seed(page_seed)
        pages = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)]
        shape = (sum(counts) + 2, self.page_size, *self.keys[0].shape[1:])
        key_cache = torch.full(shape, torch.nan, dtype=torch.float64)
        value_cache = key_cache.clone()
        tables = pages.split(counts)
        for table, key, value in zip(tables, self.keys, self.values, strict=True):
            for position in range(key.shape[0]):
                page, offset = table[position // self.page_size], position % self.page_size
                key_cache[page, offset] = key[position]
                value_cache[page, offset] = value[position]
        lengths = [tokens for _, tokens in self.sequences]
        result = paged_attention(
            torch.cat(self.queries),
            key_cache,
            value_cache,
            torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True),
            torch.tensor([0, *lengths]).cumsum(0),
            torch.tensor([length for length, _ in self.sequences]),
            max(lengths),
            prefix_lens=None if self.prefixes is None else torch.tensor(self.prefixes),
            **self.options,
        )
        return list(result.split(lengths))

    def part(self, *indices: int) -> Batch:
        """Return the batch of some of the sequences, in the given order."""

        def some(column: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(column[i] for i in indices)

        return replace(
            self,
            sequences=some(self.sequences),
            queries=some(self.queries),
            keys=some(self.keys),
            values=some(self.values),
            prefixes=None if self.prefixes is None else some(self.prefixes),
        )

    def sees(self, sequence: int, position: int, key: int) -> bool:
        """Say whether the token at ``position`` sees the one at ``other``."""
        prefix = 0 if self.prefixes is None else self.prefixes[sequence]
        window = self.options["window_tokens"]
        later = not self.options["causal"] or (key < prefix and position < prefix)
        return (later or key <= position) and (window is None or position - key < window)


@st.composite
def batches(draw: st.DrawFn, /, **fixed: Any) -> Batch:
    kv_heads, group, head_size = (draw(st.integers(1, 3)) for _ in range(3))
    sequences = tuple(
        (length, draw(st.integers(1, length)))
        for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def numbers(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, head_size, generator=generator, dtype=torch.float64)

    options: dict[str, Any] = {
        "scale": draw(st.sampled_from([0.3, 1.0, 2.0])),
        "causal": draw(st.booleans()),
        "window_tokens": draw(st.one_of(st.none(), st.integers(1, 13))),
        "softcap": draw(st.sampled_from([None, 0.7, 5.0])),
        "sinks": numbers(1, kv_heads * group)[0, :, 0] if draw(st.booleans()) else None,
        "alibi_slopes": numbers(1, kv_heads * group)[0, :, 0].abs()
        if draw(st.booleans())
        else None,
        "key_scale": draw(
            st.sampled_from([None, numbers(1, 1)[0, :, 0], numbers(1, kv_heads)[0, :, 0]])
        ),
        "value_scale": draw(
            st.sampled_from([None, numbers(1, 1)[0, :, 0], numbers(1, kv_heads)[0, :, 0]])
        ),
    }
    prefixes = tuple(draw(st.integers(0, 14)) for _ in sequences) if draw(st.booleans()) else None
    return Batch(
        sequences,
        draw(st.integers(1, 5)),
        tuple(numbers(tokens, kv_heads * group) for _, tokens in sequences),
        tuple(numbers(length, kv_heads) for length, _ in sequences),
        tuple(numbers(length, kv_heads) for length, _ in sequences),
        fixed.pop("prefixes", prefixes),
        {**options, **fixed},
    )


def scaled(batch: Batch, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as they are after multiplication by their scales."""
    keys, values = batch.keys[sequence], batch.values[sequence]
    key_scale, value_scale = batch.options["key_scale"], batch.options["value_scale"]
    return (
        keys if key_scale is None else keys * key_scale.view(1, -1, 1),
        values if value_scale is None else values * value_scale.view(1, -1, 1),
    )


def attend_one_by_one(batch: Batch, sequence: int) -> torch.Tensor:
    """Return the output of one sequence from its definition, in loops."""
    query = batch.queries[sequence]
    keys, values = scaled(batch, sequence)
    length, tokens = batch.sequences[sequence]
    group = query.shape[1] // keys.shape[1]
    cap, slopes, sinks = (batch.options[name] for name in ("softcap", "alibi_slopes", "sinks"))
    out = torch.empty_like(query)
    for row in range(tokens):
        position = length - tokens + row
        for head in range(query.shape[1]):
            mixed = torch.zeros(query.shape[2], dtype=torch.float64)
            total = 0.0 if sinks is None else math.exp(sinks[head])
            for key in range(length):
                if not batch.sees(sequence, position, key):
                    continue
                score = float(query[row, head] @ keys[key, head // group])
                score *= batch.options["scale"]
                if cap is not None:
                    score = cap * math.tanh(score / cap)
                if slopes is not None:
                    score -= float(slopes[head]) * abs(key - position)
                total += math.exp(score)
                mixed += math.exp(score) * values[key, head // group]
            out[row, head] = mixed / total
    return out


@few
@given(batches())
def test_attention_matches_its_definition(batch: Batch) -> None:
    for sequence, output in enumerate(batch.attend()):
        torch.testing.assert_close(output, attend_one_by_one(batch, sequence))


@few
@given(batches(softcap=None, sinks=None))
def test_attention_matches_torch(batch: Batch) -> None:
    slopes = batch.options["alibi_slopes"]
    for sequence, output in enumerate(batch.attend()):
        query, (key, value) = batch.queries[sequence], scaled(batch, sequence)
        length, tokens = batch.sequences[sequence]
        positions = range(length - tokens, length)
        sees = [[batch.sees(sequence, at, seen) for seen in range(length)] for at in positions]
        distance = torch.arange(length - tokens, length)[:, None] - torch.arange(length)
        mask = torch.zeros(query.shape[1], tokens, length, dtype=torch.float64)
        if slopes is not None:
            mask -= slopes[:, None, None] * distance.abs()
        mask.masked_fill_(~torch.tensor(sees), -torch.inf)
        expected = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            scale=batch.options["scale"],
            enable_gqa=True,
        )
        torch.testing.assert_close(output, expected[0].transpose(0, 1))


@few
@given(batches(causal=True, prefixes=None), st.data())
def test_chunked_prefill_equals_whole_prefill(batch: Batch, data: st.DataObject) -> None:
    """A query cut in two: the first part sees the cache as it was before the second."""
    for sequence, expected in enumerate(batch.attend()):
        length, tokens = batch.sequences[sequence]
        query, keys, values = (c[sequence] for c in (batch.queries, batch.keys, batch.values))
        cut = data.draw(st.integers(0, tokens - 1))
        num_cached = length - tokens + cut
        last = (length, tokens - cut), query[cut:], keys, values
        first = (num_cached, cut), query[:cut], keys[:num_cached], values[:num_cached]
        chunks = (first, last) if cut else (last,)
        sequences, queries, key_parts, value_parts = zip(*chunks, strict=True)
        cut_batch = replace(
            batch, sequences=sequences, queries=queries, keys=key_parts, values=value_parts
        )
        torch.testing.assert_close(torch.cat(cut_batch.attend()), expected)


@few
@given(batches(), st.integers(1, 1000))
def test_the_order_of_pages_does_not_matter(batch: Batch, page_seed: int) -> None:
    for ordered, shuffled in zip(batch.attend(), batch.attend(page_seed), strict=True):
        assert torch.equal(ordered, shuffled)


@few
@given(batches(), st.data())
def test_other_sequences_of_the_batch_do_not_matter(batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(batch.sequences))))
    together = batch.attend()
    for index, output in zip(order, batch.part(*order).attend(), strict=True):
        torch.testing.assert_close(output, together[index])
    for index, output in enumerate(together):
        (alone,) = batch.part(index).attend()
        torch.testing.assert_close(alone, output)


@few
@given(batches(sinks=None, value_scale=None))
def test_attention_to_one_token_returns_its_value(batch: Batch) -> None:
    alone = replace(
        batch.part(0),
        sequences=((1, 1),),
        queries=(batch.queries[0][:1],),
        keys=(batch.keys[0][:1],),
        values=(batch.values[0][:1],),
    )
    group = batch.queries[0].shape[1] // batch.values[0].shape[1]
    expected = batch.values[0][:1].repeat_interleave(group, dim=1)
    torch.testing.assert_close(alone.attend()[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_stay_in_float32(dtype: torch.dtype) -> None:
    """In 16 bits 1000.25 and 1000.5 are one number."""
    result = paged_attention(
        query=torch.ones(1, 1, 2, dtype=dtype),
        key_cache=torch.tensor([[1000, 0.25], [1000, 0.5]], dtype=dtype).view(1, 2, 1, 2),
        value_cache=torch.tensor([[0, 1], [1, 0]], dtype=dtype).view(1, 2, 1, 2),
        page_table=torch.zeros(1, 1, dtype=torch.int64),
        query_starts=torch.tensor([0, 1]),
        seq_lens=torch.tensor([2]),
        max_query_tokens=1,
        scale=1.0,
        causal=True,
        window_tokens=None,
        softcap=None,
    )
    assert result.dtype == dtype
    second = 1 / (1 + math.exp(-0.25))
    assert result.flatten().tolist() == pytest.approx([second, 1 - second], rel=5e-3)


@few
@given(batches(softcap=None, alibi_slopes=None))
def test_a_sink_acts_as_a_key_without_a_value(batch: Batch) -> None:
    """With a sink of -inf nothing changes; a large one leaves nothing."""
    heads = batch.queries[0].shape[1]
    sinks = {
        name: torch.full((heads,), score, dtype=torch.float64)
        for name, score in (("none", -torch.inf), ("all", 1e4))
    }
    without = replace(batch, options={**batch.options, "sinks": None}).attend()
    neutral, drained = (
        replace(batch, options={**batch.options, "sinks": sink}).attend() for sink in sinks.values()
    )
    for plain, same, nothing in zip(without, neutral, drained, strict=True):
        torch.testing.assert_close(plain, same)
        assert not nothing.any()


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_8_bit_cache_is_multiplied_by_its_scales(cache_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 4, 2, 8, generator=generator).mul(50).to(cache_dtype)
    scales = torch.tensor([0.02, 0.03]), torch.tensor([0.01])
    arguments: dict[str, Any] = {
        "page_table": torch.tensor([[1, 0]]),
        "query_starts": torch.tensor([0, 3]),
        "seq_lens": torch.tensor([7]),
        "max_query_tokens": 3,
        "scale": 0.5,
        "causal": True,
        "window_tokens": None,
        "softcap": None,
    }
    query = torch.randn(3, 4, 8, generator=generator)
    actual = paged_attention(
        query, keys, values, **arguments, key_scale=scales[0], value_scale=scales[1]
    )
    dequantized = keys.float() * scales[0][:, None], values.float() * scales[1]
    torch.testing.assert_close(actual, paged_attention(query, *dequantized, **arguments))
    assert (
        actual - paged_attention(query, *dequantized, **{**arguments, "scale": 0.25})
    ).abs().max() > 1e-2
