"""A step as flash attention of any version wants it, with pages: the batch in int32.

Dimensions: T tokens, B sequences, M pages of the longest sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from interposer import AttentionBatch, AttentionSpec, Verdict

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


class FlashStep(NamedTuple):
    """Arguments that all layers of a step share: int32, but for the slots.

    Attributes:
        slots: ``[T]`` int64.
        page_table: ``[B, M]``.
        seq_lens: ``[B]``.
        query_starts: ``[B + 1]``.
    """

    slots: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    max_query_tokens: int
    max_seq_tokens: int

    @classmethod
    def of(cls, batch: AttentionBatch) -> FlashStep:
        """Return ``batch`` in int32; the host waits for nothing.

        So a graph that is captured holds the conversion too, and whatever it reads stays at its
        address: lengths and pages are those of each replay, and what the host is told, the most
        that the graph has room for.
        """
        return cls(
            batch.slots,
            batch.page_table.to(torch.int32),
            batch.seq_lens.to(torch.int32),
            batch.query_starts.to(torch.int32),
            batch.max_query_tokens,
            batch.max_seq_tokens,
        )


def judge_flash(spec: AttentionSpec) -> Verdict:
    """Accept plain decoders in 16 bits, with the head sizes that the kernels are compiled for."""
    if spec.dtype not in _DTYPES:
        return Verdict.refuse(f"computes in 16 bit floats, got {spec.dtype}")
    if spec.head_size % 8 or spec.head_size > _LARGEST_HEAD:
        return Verdict.refuse(
            f"takes heads of multiples of 8 up to {_LARGEST_HEAD}, got {spec.head_size}"
        )
    return spec.judge_plain_decoder()
