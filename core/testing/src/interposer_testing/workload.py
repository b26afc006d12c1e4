"""Typical steps for measurements and tests: sequences, batches and random inputs of attention.

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

_MAX_DECODES = 32
_CONTEXT_TOKENS = 512

# Largest quantized values for fp8: exact in every 8-bit float, so scales cause no clamping.
_MAX_FP8_VALUES = (128.0, 160.0, 192.0, 224.0)
# Largest quantized values for int8, which fit without clamping.
_MAX_INT8_VALUES = (97.0, 107.0, 117.0, 127.0)
# Adjacent elements with a scale and a zero point of their own, in a 4-bit cache.
_GROUP_SIZE = 32


def typical_sequences(num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the sequences of a step with ``num_tokens`` tokens, as (context length, new tokens).

    Up to 32 tokens are a decode step of as many sequences, with a context of 512 tokens including
    the new one. More tokens are one prompt.
    """
    if num_tokens <= _MAX_DECODES:
        return ((_CONTEXT_TOKENS, 1),) * num_tokens
    return ((num_tokens, num_tokens),)


def typical_step(num_tokens: int, page_size: int) -> tuple[AttentionBatch, int]:
    """Return the batch of ``typical_sequences`` in host memory, and P, the number of pages.

    Every sequence has consecutive pages.
    """
    sequences = typical_sequences(num_tokens)
    counts = [-(-cached // page_size) for cached, _ in sequences]
    tables = torch.arange(sum(counts)).split(counts)
    starts = [cached - new for cached, new in sequences]
    return paged_batch(tables, starts, [new for _, new in sequences], page_size), sum(counts)


def paged_batch(
    tables: Sequence[torch.Tensor], starts: Sequence[int], lengths: Sequence[int], page_size: int
) -> AttentionBatch:
    """Create the paged batch of one step from page tables and lengths of the sequences.

    Args:
        tables: page numbers of each sequence, in order.
        starts: number of tokens of each sequence in the cache before the step.
        lengths: number of new tokens of each sequence.
    """
    positions = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    slots = [
        table[position // page_size] * page_size + position % page_size
        for table, position in zip(tables, positions, strict=True)
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
    """Copy a batch in host memory to ``device``; the copy refers to the original as ``host``."""
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
    """Draw query ``[T, N, D]``, key and value ``[T, K, D]`` between -1 and 1.

    The value differs for some specs: for latent attention, the value is the first part of the key;
    for an indexer, the weights of its heads ``[T, N]`` in float32 or wider; for sparse attention,
    selected token positions of ``batch``, ``[T, top_k]`` int32 padded with -1, or ``[T, 0]`` if no
    sequence is longer than ``top_k``. For a uint4 cache, keys and values are exact after
    quantization.

    Args:
        fused: return slices of one tensor, as a fused QKV projection does.
    """
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    shape = (num_tokens, sum(heads), spec.head_size)
    projection = (2 * torch.rand(shape, generator=generator) - 1).to(spec.dtype)
    if spec.cache_dtype == UINT4:
        _make_exact(projection[:, spec.num_heads :])
    query, key, value = projection.split(heads, dim=1)
    if spec.type == "indexer":
        value = 2 * torch.rand(num_tokens, spec.num_heads, generator=generator) - 1
        value = value.to(torch.promote_types(spec.dtype, torch.float32))
    elif spec.sparse and batch is not None:
        value = _selected_tokens(batch, spec.top_k, generator)
    elif spec.latent:
        value = key[..., : spec.latent_size]
    # ``split`` returns views; without ``fused``, copy them to dense memory.
    parts = [query, key, value]
    return parts if fused else [part.contiguous() for part in parts]


def _make_exact(numbers: torch.Tensor) -> None:
    """Round the numbers to multiples of 1/8, and put both extremes into each group of 32.

    The 4-bit scale of the group is then 1/8, so quantization is exact.
    """
    numbers.mul_(8).floor_().clamp_(-8, 7).div_(8)
    numbers[..., ::_GROUP_SIZE] = -1
    numbers[..., 1::_GROUP_SIZE] = 7 / 8


def _selected_tokens(batch: AttentionBatch, top_k: int, generator: torch.Generator) -> torch.Tensor:
    if batch.max_seq_tokens <= top_k:
        return torch.empty(len(batch.slots), 0, dtype=torch.int32)
    rows = []
    counts = batch.query_starts.diff().tolist()
    for count, length in zip(counts, batch.seq_lens.tolist(), strict=True):
        for num_visible in range(length - count + 1, length + 1):
            row = torch.full((top_k,), -1, dtype=torch.int32)
            selected = torch.randperm(num_visible, generator=generator)[:top_k].sort().values
            row[: len(selected)] = selected.int()
            rows.append(row)
    return torch.stack(rows)


def random_scales(spec: AttentionSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """Draw the scales of keys and values for an 8-bit cache of numbers between -1 and 1.

    Each is float32 ``[1]``, or ``[K]`` with ``head_scales``.
    """
    is_float = spec.cache_dtype.is_floating_point
    max_values = torch.tensor(_MAX_FP8_VALUES if is_float else _MAX_INT8_VALUES)
    shape = (2, spec.num_kv_heads if spec.head_scales else 1)
    index = torch.randint(len(max_values), shape, generator=generator)
    return list(1 / max_values[index])


def random_sinks(spec: AttentionSpec, generator: torch.Generator) -> torch.Tensor:
    """Draw one attention sink score per head, ``[N]`` in the dtype of the spec."""
    return torch.randn(spec.num_heads, generator=generator).to(spec.dtype)
