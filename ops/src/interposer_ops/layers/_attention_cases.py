"""Test cases of the attention layer, and steps of sequences for any attention backend.

Dimensions: T tokens, N heads, K kv heads, D head size, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from interposer import AttentionBatch, AttentionSpec, Case, Site, Tolerance
from interposer_ops.attention._sequences_cases import LENGTHS, Lengths, paged
from interposer_ops.caches._paging_cases import starts_of
from interposer_ops.experts._error_propagation_cases import Errors
from interposer_ops.layers.attention import Attention
from interposer_testing.cases import LayerCase, OfLayer, Placed, normal


def attention_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of prefill, chunked prefill and decode; backends have more cases of their own."""
    generator = torch.Generator().manual_seed(seed)
    for label, heads, kv_heads, window in (
        ("prefill around page edges", 4, 2, None),
        ("decode around page edges", 6, 2, None),
        ("chunk after a prefix", 3, 1, 4),
        ("page of 16", 2, 2, None),
    ):
        spec = plain_spec((heads, kv_heads, 32), dtype, LENGTHS[label].page_size, window)
        step, errors = Step(LENGTHS[label], spec, generator), Errors()
        count = LENGTHS[label].num_tokens
        query, key, value = (
            normal((count, n, 32), dtype, generator) for n in (heads, kv_heads, kv_heads)
        )
        errors.show(attended(step, query.double(), key.double(), value.double(), errors))
        yield LayerCase(
            label,
            {"spec": Placed(partial(spec_at, spec))},
            (query, key, value, OfLayer(step.cache), OfLayer(step.plan)),
            facts=Case("", {}, magnitude=errors.bound(dtype)),
            tolerance=Tolerance(roundings=1),
        )


def plain_spec(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    page_size: int = 16,
    window_tokens: int | None = None,
) -> AttentionSpec:
    """Return an attention spec of N heads and K kv heads of size D, with doubled scale."""
    num_heads, num_kv_heads, size = heads
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=size,
        dtype=dtype,
        cache_dtype=dtype,
        page_size=page_size,
        scale=2 * size**-0.5,
        window_tokens=window_tokens,
    )


def spec_at(spec: AttentionSpec, site: Site) -> AttentionSpec:
    """Return the attention spec with the dtype of ``site``."""
    return replace(spec, dtype=site.dtype, cache_dtype=site.dtype)


class Step:
    """A batch: new tokens of several sequences, whose earlier tokens are already in the cache."""

    def __init__(self, lengths: Lengths, spec: AttentionSpec, generator: torch.Generator) -> None:
        self.lengths, self.spec = lengths, spec
        self.where = paged(lengths, generator)
        before = sum(cached - tokens for cached, tokens in lengths.sequences)
        shapes = [(before, heads, spec.head_size) for heads in (spec.num_heads, spec.num_kv_heads)]
        self.query, self.key = (normal(shape, spec.dtype, generator) for shape in shapes)
        self.value = normal(shapes[1], spec.dtype, generator)

    def cache(self, layer: Attention, device: str) -> Tensor:
        """Allocate a cache for the layer's backend, and write the earlier tokens to the cache."""
        layout = layer.backend.kv_layout()
        (cache,) = layout.allocate(1, self.where.num_pages, device)
        if len(self.key):
            batch = self._batch(device, is_earlier=True)
            heads = [part.to(device, layout.dtype) for part in (self.query, self.key, self.value)]
            layer(*heads, cache, layer.backend.plan(batch))
        return cache

    def plan(self, layer: Attention, device: str) -> object:
        """Plan the new tokens with the layer's backend."""
        return layer.backend.plan(self._batch(device, is_earlier=False))

    def _batch(self, device: str, *, is_earlier: bool) -> AttentionBatch:
        counts, lengths, slots = [], [], []
        begin = 0
        for cached, tokens in self.lengths.sequences:
            num_earlier = cached - tokens
            counts.append(num_earlier if is_earlier else tokens)
            lengths.append(num_earlier if is_earlier else cached)
            sequence_slots = self.where.slots[begin : begin + cached]
            slots.append(
                sequence_slots[:num_earlier] if is_earlier else sequence_slots[num_earlier:]
            )
            begin += cached
        return AttentionBatch(
            query_starts=starts_of(counts).to(device),
            seq_lens=torch.tensor(lengths).to(device),
            page_table=self.where.arguments["page_table"].to(device),
            slots=torch.cat(slots).to(device),
            max_query_tokens=max(counts),
            max_seq_tokens=max(lengths),
        )


def attended(step: Step, query: Tensor, key: Tensor, value: Tensor, errors: Errors) -> Tensor:
    """Compute the attention ``[T, N, D]`` of a step in float64, and track errors in ``errors``.

    Args:
        query: ``[T, N, D]`` of the new tokens; ``key`` and ``value`` are ``[T, K, D]``.
    """
    groups = query.shape[1] // key.shape[1]
    outputs, tokens, earlier = [], 0, 0
    for cached, count in step.lengths.sequences:
        new_rows, earlier_rows = (
            slice(tokens, tokens + count),
            slice(earlier, earlier + cached - count),
        )
        keys, values = (
            torch.cat((before[earlier_rows].double(), now[new_rows])).repeat_interleave(groups, 1)
            for before, now in ((step.key, key), (step.value, value))
        )
        tokens, earlier = new_rows.stop, earlier_rows.stop
        outputs.append(_attend(step.spec, query[new_rows], keys, values, errors))
    return torch.cat(outputs)


def _attend(
    spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, errors: Errors
) -> Tensor:
    """Compute attention ``[T, N, D]`` of one sequence; keys and values are ``[L, N, D]``."""
    length, count = len(keys), len(query)
    distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
    is_attended = (distance >= 0) & (distance < (spec.window_tokens or length))
    scores = spec.scale * torch.einsum("tnd,lnd->ntl", query, keys)
    # A softmax weight has the error of its score plus a rounding; the scaled query may be rounded.
    terms = 1 + spec.scale * torch.einsum("tnd,lnd->ntl", query.abs(), keys.abs())
    scores = errors.note(scores, 2, spec.head_size + length + 8, terms, terms)
    weights = scores.masked_fill(~is_attended, -torch.inf).softmax(-1)
    mixed = torch.einsum("ntl,lnd->tnd", weights, values)
    terms = torch.einsum("ntl,lnd->tnd", weights, values.abs())
    return errors.note(mixed, 2, length + 2, terms)
