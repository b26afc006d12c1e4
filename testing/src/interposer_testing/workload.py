"""The sequences of a step of so many tokens, and batches of given sequences.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from interposer import AttentionBatch, AttentionSpec
from interposer.tooling import UINT4

__all__ = [
    "moved_batch",
    "paged_batch",
    "random_projections",
    "random_scales",
    "random_sinks",
    "typical_sequences",
    "typical_step",
]

_MOST_DECODES = 32
_CONTEXT_TOKENS = 512

# Numbers that every float of 8 bits holds exactly, so that nothing is rounded beyond them.
_LARGEST_STORED = (128.0, 160.0, 192.0, 224.0)
# Of int8, so that nothing is clamped.
_LARGEST_CODES = (97.0, 107.0, 117.0, 127.0)
# Neighbours that may have a step and a base of their own, in a cache of 4 bits.
_GROUP_SIZE = 32


def typical_sequences(num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the sequences of a step as (tokens in the cache, tokens of the query).

    Up to 32 tokens are those of as many sequences that decode behind a context, 512 tokens with
    the new one. More are a single prompt.
    """
    if num_tokens <= _MOST_DECODES:
        return ((_CONTEXT_TOKENS, 1),) * num_tokens
    return ((num_tokens, num_tokens),)


def typical_step(num_tokens: int, page_size: int) -> tuple[AttentionBatch, int]:
    """Return the batch of ``typical_sequences`` in host memory, and P.

    The pages of a sequence follow each other, as those of a prompt do.
    """
    sequences = typical_sequences(num_tokens)
    counts = [-(-cached // page_size) for cached, _ in sequences]
    tables = torch.arange(sum(counts)).split(counts)
    starts = [cached - new for cached, new in sequences]
    return paged_batch(tables, starts, [new for _, new in sequences], page_size), sum(counts)


def paged_batch(
    tables: Sequence[torch.Tensor], starts: Sequence[int], lengths: Sequence[int], page_size: int
) -> AttentionBatch:
    """Return the batch of sequences of which each has stored some tokens and adds more.

    Args:
        tables: pages of each sequence, in order.
        starts: tokens of each that are in the cache before the step.
        lengths: tokens that each adds.
    """
    positions = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    slots = [
        table[at // page_size] * page_size + at % page_size
        for table, at in zip(tables, positions, strict=True)
    ]
    seq_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
    return AttentionBatch(
        query_starts=torch.tensor([0, *lengths]).cumsum(0),
        seq_lens=torch.tensor(seq_lens),
        page_table=torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True),
        slots=torch.cat(slots),
        max_query_tokens=max(lengths),
        max_seq_tokens=max(seq_lens),
    )


def moved_batch(batch: AttentionBatch, device: str) -> AttentionBatch:
    """Return ``batch``, of host memory, with its tensors on ``device``, and itself beside them."""
    tensors = {
        field.name: getattr(batch, field.name).to(device)
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor)
    }
    return replace(batch, **tensors, host=None if torch.device(device).type == "cpu" else batch)


def random_projections(
    spec: AttentionSpec,
    num_tokens: int,
    generator: torch.Generator,
    *,
    fused: bool,
    batch: AttentionBatch | None = None,
) -> list[torch.Tensor]:
    """Return random query ``[T, N, D]``, key and value ``[T, K, D]`` between -1 and 1.

    ``fused`` gives them as slices of one product. Where the spec is latent, the value is the first
    part of the key; that of an indexer are the weights of its heads ``[T, N]``, float32 or wider.
    Where the spec is sparse it names tokens of ``batch``, ``[T, X]`` int32: at most ``top_k``, the
    rest is -1, and X is 0 where no sequence has more. A cache of uint4 holds what is given exactly.
    """
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    shape = (num_tokens, sum(heads), spec.head_size)
    product = (2 * torch.rand(shape, generator=generator) - 1).to(spec.dtype)
    if spec.cache_dtype == UINT4:
        _make_exact(product[:, spec.num_heads :])
    query, key, value = product.split(heads, dim=1)
    if spec.type == "indexer":
        value = 2 * torch.rand(num_tokens, spec.num_heads, generator=generator) - 1
        value = value.to(torch.promote_types(spec.dtype, torch.float32))
    elif spec.sparse and batch is not None:
        value = _named_tokens(batch, spec.top_k, generator)
    elif spec.latent:
        value = key[..., : spec.latent_size]
    parts = [query, key, value]
    return parts if fused else [part.contiguous() for part in parts]


def _make_exact(numbers: torch.Tensor) -> None:
    """Round numbers to what groups of 4 bits hold: eighths, both ends among 32 neighbours."""
    numbers.mul_(8).floor_().clamp_(-8, 7).div_(8)
    numbers[..., ::_GROUP_SIZE] = -1
    numbers[..., 1::_GROUP_SIZE] = 7 / 8


def _named_tokens(batch: AttentionBatch, top_k: int, generator: torch.Generator) -> torch.Tensor:
    if batch.max_seq_tokens <= top_k:
        return torch.empty(len(batch.slots), 0, dtype=torch.int32)
    rows = []
    counts = batch.query_starts.diff().tolist()
    for count, length in zip(counts, batch.seq_lens.tolist(), strict=True):
        for seen in range(length - count + 1, length + 1):
            row = torch.full((top_k,), -1, dtype=torch.int32)
            chosen = torch.randperm(seen, generator=generator)[:top_k].sort().values
            row[: len(chosen)] = chosen.int()
            rows.append(row)
    return torch.stack(rows)


def random_scales(spec: AttentionSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """Return scales of keys and of values that bring numbers between -1 and 1 to 8 bits.

    Each is ``[1]``, or ``[K]`` with ``head_scales``, float32.
    """
    is_float = spec.cache_dtype.is_floating_point
    largest = torch.tensor(_LARGEST_STORED if is_float else _LARGEST_CODES)
    shape = (2, spec.num_kv_heads if spec.head_scales else 1)
    chosen = torch.randint(len(largest), shape, generator=generator)
    return list(1 / largest[chosen])


def random_sinks(spec: AttentionSpec, generator: torch.Generator) -> torch.Tensor:
    """Return a score for each head ``[N]``, in the dtype of the spec."""
    return torch.randn(spec.num_heads, generator=generator).to(spec.dtype)
