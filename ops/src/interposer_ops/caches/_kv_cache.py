"""Writing to and reading from a paged cache.

Dimensions: T tokens, K kv heads, D head size, B sequences, M pages of the longest sequence, P
pages, S page size, C latent size, R rotated size, L cached tokens that are read.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op

_op = partial(
    standard_op, cases="interposer_ops.caches._kv_cache_cases", tolerance=Tolerance(roundings=0)
)


@_op(
    "reshape_and_cache",
    batch_invariant=True,
    mutates=("key_cache", "value_cache"),
    batched=("key", "value", "slots"),
)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Store each token's key and value in its slot.

    Padding tokens go to the slots of a page that is never read, so every slot must be valid.

    Args:
        key: ``[T, K, D]``, any float dtype; tokens may be strided.
        value: ``[T, K, D]``, dtype of ``key``; tokens may be strided.
        key_cache: ``[P, S, K, D]``, dtype of ``key``, written in place; pages may be strided.
        value_cache: ``[P, S, K, D]``, dtype of ``key``, written in place; pages may be strided.
        slots: ``[T]`` int64, page * S + offset, distinct.
    Dims: num_heads, num_kv_heads, head_size, page_size, windowed, softcapped.
    """
    page_size = key_cache.shape[1]
    pages, offsets = slots // page_size, slots % page_size
    key_cache[pages, offsets] = key
    value_cache[pages, offsets] = value


@_op("gather_cache")
def gather_cache(
    cache: Tensor, page_table: Tensor, seq_lens: Tensor, starts: Tensor, num_tokens: int
) -> Tensor:
    """Gather the cached rows of all sequences into one contiguous tensor, padded with zeros.

    Sequence b has ``seq_lens[b]`` rows from position ``starts[b]`` on: the whole sequence, or
    one chunk.

    Args:
        cache: ``[P, S, K, D]``, any float dtype; pages may be strided.
        page_table: ``[B, M]`` int64; entries that no gathered position needs are valid but unread.
        seq_lens: ``[B]`` int64, at most T together.
        starts: ``[B]`` int64.
        num_tokens: T.
    Returns: ``[T, K, D]``, dtype of ``cache``.
    Dims: num_kv_heads, head_size, page_size.
    """
    return gathered_rows(cache, page_table, seq_lens, starts, num_tokens)


@_op(
    "write_latent_cache",
    batch_invariant=True,
    mutates=("cache",),
    batched=("latent", "rope_key", "slots"),
)
def write_latent_cache(latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store the latent vector of each token, followed by the rotated key, in the token's slot.

    Args:
        latent: ``[T, C]``, any float dtype; rows may be strided.
        rope_key: ``[T, R]``, dtype of ``latent``; rows may be strided.
        cache: ``[P, S, C + R]``, dtype of ``latent``, written in place; pages may be strided.
        slots: ``[T]`` int64, page * S + offset, distinct.
    Dims: latent_size, rotary_size, page_size.
    Source: arXiv:2405.04434 (multi-head latent attention).
    """
    page_size = cache.shape[1]
    cache[slots // page_size, slots % page_size] = torch.cat((latent, rope_key), dim=-1)


def gathered_rows(
    cache: Tensor, page_table: Tensor, seq_lens: Tensor, starts: Tensor, num_tokens: int
) -> Tensor:
    """Gather the cached rows of all sequences, ``[T, ...]``; the reference of ``gather_cache``."""
    num_sequences, max_pages = page_table.shape
    if not num_sequences or not max_pages:
        return cache.new_zeros((num_tokens, *cache.shape[2:]))
    rows = torch.arange(num_tokens, device=cache.device)
    ends = seq_lens.cumsum(0)
    # Number of sequences that end at or before each row, so B for rows after the last sequence.
    num_ended = torch.searchsorted(ends, rows, right=True)
    sequence = num_ended.clamp(max=num_sequences - 1)
    position = starts[sequence] + rows - (ends - seq_lens)[sequence]
    # Rows after the last sequence compute positions out of range; clamping keeps the lookup valid.
    page = page_table[sequence, (position // cache.shape[1]).clamp(max=max_pages - 1)]
    stored = cache[page, position % cache.shape[1]]
    is_token = num_ended < num_sequences
    return torch.where(is_token[:, None, None], stored, torch.zeros_like(stored))


def cumulated(lengths: Tensor) -> Tensor:
    """Return the cumulative sums of ``lengths`` ``[B]`` with a leading 0, ``[B + 1]`` int32."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def slot_rows(cache: Tensor) -> tuple[Tensor, int]:
    """View a cache ``[P, S, W]`` as rows ``[L, W]``; also return the number of rows per page.

    The row of a slot is page * rows_per_page + offset. The cache is copied only if the distance
    between pages is not a whole number of rows.
    """
    num_pages, page_size, width = cache.shape
    page_stride = cache.stride(0)
    if cache.stride()[1:] != (width, 1) or page_stride % width:
        cache, page_stride = cache.contiguous(), page_size * width
    page_rows = page_stride // width
    count = (num_pages - 1) * page_rows + page_size if num_pages else 0
    return cache.as_strided((count, width), (width, 1)), page_rows


def read_slots(
    page_table: Tensor,
    firsts: Tensor,
    lengths: Tensor,
    page_size: int,
    page_rows: int | None = None,
    num_tokens: int | None = None,
) -> Tensor:
    """Return the slots ``[L]`` int64 of each sequence's tokens from ``firsts`` on.

    Args:
        page_table: ``[B, M]``.
        firsts, lengths: ``[B]``.
        page_rows: rows from one page to the next; the page size unless pages are strided in memory.
        num_tokens: L; None: computed, for which the host waits for the device.
    """
    total = int(lengths.sum()) if num_tokens is None else num_tokens
    rows, positions = read_positions(firsts, lengths, total)
    pages = page_table[rows, positions // page_size].long()
    return pages * (page_rows or page_size) + positions % page_size


def read_positions(firsts: Tensor, lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the sequence and the position of each token, ``[L]`` each, for ranges of positions.

    Sequence b contributes ``lengths[b]`` tokens from position ``firsts[b]`` on.

    Args:
        total: L, the sum of ``lengths``.
    """
    rows = torch.arange(len(lengths), device=lengths.device)
    rows = rows.repeat_interleave(lengths.long(), output_size=total)
    begins = lengths.long().cumsum(0) - lengths
    return rows, torch.arange(total, device=lengths.device) - (begins - firsts)[rows]
