"""The pages of a step's sequences one after the other, as FlashInfer takes them.

Dimensions: B sequences, M pages of the longest sequence, I pages of all sequences.
Source: docs.flashinfer.ai, tutorial "KV-Cache Layout in FlashInfer", page table layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from interposer_ops.caches import cumulated


class FlashInferPages(NamedTuple):
    """All int32.

    Attributes:
        starts: ``[B + 1]``; sequence b's pages go from entry b to before entry b + 1.
        indices: ``[I]``.
        last_tokens: ``[B]``; tokens in each sequence's last page, 0 where it has no page.
    """

    starts: torch.Tensor
    indices: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def of(
        cls, page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int
    ) -> FlashInferPages:
        """Return the pages that sequences fill, of tables ``[B, M]`` and lengths ``[B]``.

        It waits for the device once, to know how many there are; FlashInfer does so as well.
        """
        counts = (seq_lens + page_size - 1) // page_size
        filled = torch.arange(page_table.shape[1], device=page_table.device) < counts[:, None]
        last = seq_lens - (counts - 1).clamp(min=0) * page_size
        return cls(cumulated(counts), page_table[filled].to(torch.int32), last.to(torch.int32))
