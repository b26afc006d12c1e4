"""Pages of a step in FlashInfer's compressed (CSR) page table.

Dimensions: B sequences, M pages of the longest sequence, I pages of all sequences.
Source: docs.flashinfer.ai, tutorial "KV-Cache Layout in FlashInfer", page table layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from interposer_ops.caches import cumulated


class FlashInferPages(NamedTuple):
    """CSR page table of a step, all int32.

    Attributes:
        starts: ``[B + 1]``; the pages of sequence b are ``indices[starts[b]:starts[b + 1]]``.
        indices: ``[I]`` page numbers, sequence by sequence.
        last_tokens: ``[B]``; tokens in the last page of each sequence; 0 for a sequence without
            pages.
    """

    starts: torch.Tensor
    indices: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def of(
        cls, page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int
    ) -> FlashInferPages:
        """Build the compressed table from ``page_table`` ``[B, M]`` and ``seq_lens`` ``[B]``.

        The number of pages I depends on the lengths, so device tensors make the host synchronize.
        Pass host tensors to avoid that; FlashInfer plans on the host anyway.
        """
        counts = (seq_lens + page_size - 1) // page_size
        is_filled = torch.arange(page_table.shape[1], device=page_table.device) < counts[:, None]
        last_tokens = seq_lens - (counts - 1).clamp(min=0) * page_size
        return cls(
            cumulated(counts), page_table[is_filled].to(torch.int32), last_tokens.to(torch.int32)
        )

    def indexed_on(self, device: torch.device) -> FlashInferPages:
        """Return a copy with the page indices on ``device``, transferred without synchronizing.

        Starts and last tokens stay on the host, because FlashInfer reads both for the plan and then
        copies both to the device.
        """
        return self._replace(indices=self.indices.to(device, non_blocking=True))
