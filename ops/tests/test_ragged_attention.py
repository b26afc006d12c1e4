"""Attention without a cache, and joining its parts, against other formulations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch.nn import functional

from interposer_ops.attention import (
    merge_attention_states,
    paged_attention,
    ragged_attention,
    ragged_attention_with_lse,
)

few = settings(max_examples=num_examples(40))


@dataclass(frozen=True)
class Batch:
    """Queries ``[Q, N, D]``, keys ``[L, K, D]`` and values ``[L, K, E]`` of each sequence."""

    queries: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    options: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        query_lens, key_lens = ([len(rows) for rows in c] for c in (self.queries, self.keys))
        return {
            "query": torch.cat(self.queries),
            "key": torch.cat(self.keys),
            "value": torch.cat(self.values),
            "query_starts": torch.tensor([0, *query_lens]).cumsum(0),
            "key_starts": torch.tensor([0, *key_lens]).cumsum(0),
            "max_query_tokens": max(1, *query_lens),
            "max_key_tokens": max(1, *key_lens),
            **self.options,
        }

    def attend(self) -> list[torch.Tensor]:
        """Return the output of each sequence."""
        out = ragged_attention(**self.arguments())
        return list(out.split([len(query) for query in self.queries]))

    def sees(self, sequence: int) -> torch.Tensor:
        """Return which query sees which key, ``[Q, L]``."""
        rows, length = len(self.queries[sequence]), len(self.keys[sequence])
        table = torch.zeros(rows, length, dtype=torch.bool)
        for row in range(rows):
            for key in range(length):
                distance = (length - rows + row) - key
                visible = not self.options["causal"] or distance >= 0
                window = self.options["window_tokens"]
                table[row, key] = visible and (window is None or abs(distance) < window)
        return table


@st.composite
def batches(draw: st.DrawFn, /, **fixed: Any) -> Batch:
    kv_heads, group, head_size, value_size = (draw(st.integers(1, 3)) for _ in range(4))
    heads = kv_heads * group
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=4)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    options: dict[str, Any] = {
        "scale": draw(st.sampled_from([0.3, 1.0, 2.0])),
        "causal": draw(st.booleans()),
        "window_tokens": draw(st.one_of(st.none(), st.integers(1, 10))),
        "softcap": draw(st.sampled_from([None, 0.7, 5.0])),
        "sinks": numbers(heads) if draw(st.booleans()) else None,
        "alibi_slopes": numbers(heads).abs() if draw(st.booleans()) else None,
    }
    return Batch(
        tuple(numbers(queries, heads, head_size) for queries, _ in lengths),
        tuple(numbers(keys, kv_heads, head_size) for _, keys in lengths),
        tuple(numbers(keys, kv_heads, value_size) for _, keys in lengths),
        {**options, **fixed},
    )


@few
@given(batches())
def test_attention_matches_its_definition(batch: Batch) -> None:
    """In loops, with the logarithm of what the weights are divided by."""
    out, lse = ragged_attention_with_lse(**batch.arguments())
    assert torch.equal(out, ragged_attention(**batch.arguments()))
    cap, slopes, sinks = (batch.options[name] for name in ("softcap", "alibi_slopes", "sinks"))
    token = 0
    for sequence, query in enumerate(batch.queries):
        keys, values, sees = batch.keys[sequence], batch.values[sequence], batch.sees(sequence)
        group = query.shape[1] // keys.shape[1]
        for row in range(len(query)):
            for head in range(query.shape[1]):
                total = 0.0 if sinks is None else math.exp(sinks[head])
                mixed = torch.zeros(values.shape[2], dtype=torch.float64)
                for key in sees[row].nonzero().flatten().tolist():
                    score = float(query[row, head] @ keys[key, head // group])
                    score *= batch.options["scale"]
                    if cap is not None:
                        score = cap * math.tanh(score / cap)
                    if slopes is not None:
                        score -= float(slopes[head]) * abs(len(keys) - len(query) + row - key)
                    total += math.exp(score)
                    mixed += math.exp(score) * values[key, head // group]
                if total:
                    torch.testing.assert_close(out[token, head], mixed / total)
                    assert float(lse[token, head]) == pytest.approx(math.log(total))
                else:
                    assert not out[token, head].any()
                    assert float(lse[token, head]) == -torch.inf
            token += 1
    assert token == len(out)


@few
@given(batches(softcap=None, sinks=None, alibi_slopes=None))
def test_attention_matches_torch(batch: Batch) -> None:
    for sequence, output in enumerate(batch.attend()):
        sees = batch.sees(sequence)
        blind = ~sees.any(-1)
        expected = functional.scaled_dot_product_attention(
            batch.queries[sequence].transpose(0, 1)[None],
            batch.keys[sequence].transpose(0, 1)[None],
            batch.values[sequence].transpose(0, 1)[None],
            attn_mask=sees,
            scale=batch.options["scale"],
            enable_gqa=True,
        )
        expected = expected[0].transpose(0, 1)
        torch.testing.assert_close(output[~blind], expected[~blind])
        assert not output[blind].any()


@pytest.mark.parametrize("causal", [True, False])
def test_a_ragged_batch_matches_torch(causal: bool) -> None:
    """torch's own causal mask, and values of another size than keys."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 6, 4, 24, generator=generator)
    value = torch.randn(3, 6, 4, 16, generator=generator)
    starts = torch.arange(0, 19, 6)
    q, k, v = (tensor.flatten(0, 1) for tensor in (query, key, value))
    actual = ragged_attention(q, k, v, starts, starts, 6, 6, 0.4, causal, None, None, None, None)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.4)
    torch.testing.assert_close(actual, expected.transpose(1, 2).flatten(0, 1))


@few
@given(batches())
def test_other_sequences_of_the_batch_do_not_matter(batch: Batch) -> None:
    for index, output in enumerate(batch.attend()):
        columns = (batch.queries, batch.keys, batch.values)
        queries, keys, values = ((column[index],) for column in columns)
        alone = Batch(queries, keys, values, batch.options)
        torch.testing.assert_close(alone.attend()[0], output)


@few
@given(batches(causal=True, alibi_slopes=None))
def test_prefill_matches_attention_over_a_cache(batch: Batch) -> None:
    """Where queries are as many as keys; the cache has one page per sequence."""
    keys = tuple(key for key in batch.keys if len(key))
    assume(keys)
    group = batch.queries[0].shape[1] // keys[0].shape[1]
    queries = tuple(key.repeat_interleave(group, 1) for key in keys)
    combined = Batch(queries, keys, keys, batch.options)
    cache = torch.nn.utils.rnn.pad_sequence(list(keys), batch_first=True, padding_value=torch.nan)
    lengths = torch.tensor([len(key) for key in keys])
    expected = paged_attention(
        torch.cat(queries),
        cache,
        cache,
        torch.arange(len(keys))[:, None],
        combined.arguments()["query_starts"],
        lengths,
        int(lengths.max()),
        batch.options["scale"],
        True,
        batch.options["window_tokens"],
        batch.options["softcap"],
        batch.options["sinks"],
    )
    torch.testing.assert_close(torch.cat(combined.attend()), expected)


@few
@given(batches(causal=False, window_tokens=None, alibi_slopes=None), st.data())
def test_merged_parts_equal_attention_to_all_keys(batch: Batch, data: st.DataObject) -> None:
    """Keys cut in two, the sink on one side; either part may be empty."""
    expected, whole_lse = ragged_attention_with_lse(**batch.arguments())
    cuts = [data.draw(st.integers(0, len(keys))) for keys in batch.keys]
    halves = [
        [
            tuple(rows[piece] for rows, piece in zip(column, pieces, strict=True))
            for column in (batch.keys, batch.values)
        ]
        for pieces in ([slice(0, cut) for cut in cuts], [slice(cut, None) for cut in cuts])
    ]
    options = batch.options, {**batch.options, "sinks": None}
    first, second = (
        ragged_attention_with_lse(**Batch(batch.queries, half[0], half[1], chosen).arguments())
        for half, chosen in zip(halves, options, strict=True)
    )
    for side_a, side_b in ((first, second), (second, first)):
        out, lse = merge_attention_states(*side_a, *side_b)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, whole_lse)


def test_merging_with_an_empty_side_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(3, 2, 8, generator=generator, dtype=torch.bfloat16)
    lse = torch.tensor([[1e4, -1e4], [200.0, -200.0], [0.0, 3.0]])
    nothing = torch.zeros_like(out), torch.full((3, 2), -torch.inf)
    for sides in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, merged_lse = merge_attention_states(*sides)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)
    merged, merged_lse = merge_attention_states(*nothing, *nothing)
    assert not merged.any()
    assert (merged_lse == -torch.inf).all()
    assert merged_lse.dtype == torch.float32
