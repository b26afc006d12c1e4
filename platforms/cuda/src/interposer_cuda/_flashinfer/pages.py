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

        How many there are depends on the lengths, so that the host waits for them, unless both are
        in its memory. FlashInfer plans on the host as well.
        """
        counts = (seq_lens + page_size - 1) // page_size
        filled = torch.arange(page_table.shape[1], device=page_table.device) < counts[:, None]
        last = seq_lens - (counts - 1).clamp(min=0) * page_size
        return cls(cumulated(counts), page_table[filled].to(torch.int32), last.to(torch.int32))

    def indexed_on(self, device: torch.device) -> FlashInferPages:
        """Return the pages with their indices on ``device``, where nothing is waited for.

        FlashInfer copies the others itself and keeps them on the host to plan with.
        """
        return self._replace(indices=self.indices.to(device, non_blocking=True))
