"""The batch of one step in the form that every FlashAttention version takes: int32 tensors.

Dimensions: T tokens, B sequences, M pages of the longest sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from interposer import AttentionBatch, AttentionSpec, Verdict

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


class FlashStep(NamedTuple):
    """Arguments of FlashAttention that all layers of a step share: int32, except the slots.

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
        """Convert ``batch`` to int32 without synchronizing with the device.

        A captured graph therefore contains the conversion. Each replay reads the current lengths
        and page tables at fixed addresses, while ``max_query_tokens`` and ``max_seq_tokens`` stay
        at the capacity of the graph.
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
    """Accept plain causal decoders in float16 or bfloat16 with a compiled head size."""
    if spec.dtype not in _DTYPES:
        return Verdict.refuse(f"computes in 16 bit floats, got {spec.dtype}")
    if spec.head_size % 8 or spec.head_size > _LARGEST_HEAD:
        return Verdict.refuse(
            f"takes heads of multiples of 8 up to {_LARGEST_HEAD}, got {spec.head_size}"
        )
    return spec.judge_plain_decoder()
