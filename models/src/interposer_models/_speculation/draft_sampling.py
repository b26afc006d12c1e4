"""Sampling and verification of draft tokens.

Dimensions: R rows of logits, B sequences, S most draft tokens per sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from interposer import CustomOp, Site
from interposer_ops.layers.sampler import SamplingBatch
from interposer_ops.sampling import (
    apply_temperature,
    greedy_verify,
    gumbel_argmax,
    mask_min_p,
    mask_top_k_top_p,
    rejection_sample,
)


class DraftSampling:
    """Kernels of speculative decoding; bound only by engines with a proposer.

    The distribution of a row is that of ``sample_tokens``: temperature, then top-k, top-p and
    min-p.
    """

    def __init__(self, site: Site, vocab_size: int, num_drafts: int, certain: bool) -> None:
        """Bind the kernels.

        Args:
            num_drafts: S.
            certain: Whether the proposer has no distributions, as with prompt lookup.
        Raises: InterposerError: the policy leaves no kernel for an op.
        """
        draft_sizes = {"vocab_size": vocab_size, "num_draft_tokens": num_drafts}
        wide_site = replace(site, dtype=torch.promote_types(site.dtype, torch.float32))

        def bound(op: CustomOp[..., Any]) -> Callable[..., Tensor]:
            return wide_site.bind(op, vocab_size=vocab_size)

        self._num_drafts = num_drafts
        self._wide_dtype = wide_site.dtype
        self._greedy_verify = site.bind(greedy_verify, **draft_sizes)
        self._verify = wide_site.bind(rejection_sample, **draft_sizes, certain_drafts=certain)
        self._temper = bound(apply_temperature)
        self._truncate = bound(mask_top_k_top_p)
        self._mask_min_p = bound(mask_min_p)
        self._draw = None if certain else bound(gumbel_argmax)

    def draw(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor | None]:
        """Draw one token per row of a draft model's logits.

        Args:
            logits: ``[R, V]``, any float dtype.
        Returns: tokens ``[R]`` int64, and the distributions ``[R, V]`` in float32 or wider; None if
            all rows are greedy.
        """
        if batch.temperature is None or self._draw is None:
            return logits.argmax(-1), None
        logits = self._processed(logits, batch)
        # The logits are divided already: temperature 1 adds noise, and 0 takes the argmax.
        temperature = (batch.temperature > 0).to(torch.float32)
        return self._draw(logits, temperature, batch.seeds, batch.steps), logits.softmax(-1)

    def verify_greedy(self, drafts: Tensor, counts: Tensor, logits: Tensor) -> Tensor:
        """Return the tokens of greedy decoding, ``[B, S + 1]`` int64, padded with -1.

        Args:
            drafts: ``[B, S]`` int64.
            counts: ``[B]`` int64, number of draft tokens of each sequence.
            logits: ``[R, V]``, dtype of the site: for each sequence the row of the newest token,
                then the rows of the draft tokens.
        """
        return self._greedy_verify(drafts, self._padded_rows(logits, counts), counts)[0]

    def verify(
        self,
        drafts: Tensor,
        counts: Tensor,
        logits: Tensor,
        batch: SamplingBatch,
        probs: Tensor | None,
    ) -> Tensor:
        """Draw accepted tokens from the distributions of ``logits``.

        Args:
            drafts, counts, logits: As in ``verify_greedy``, also the result.
            batch: Parameters of the R rows, not all greedy.
            probs: ``[B, S, V]``, the distributions of the draft tokens; None for a proposer without
                distributions.
        """
        target = self._padded_rows(self._processed(logits, batch).softmax(-1), counts)
        firsts = (counts + 1).cumsum(0) - counts - 1
        noise = batch.seeds[firsts], batch.steps[firsts]
        return self._verify(drafts, probs, target, counts, *noise)[0]

    def _processed(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        logits = self._temper(logits.to(self._wide_dtype), batch.temperature)
        if batch.top_k is not None or batch.top_p is not None:
            logits = self._truncate(logits, batch.top_k, batch.top_p)
        return logits if batch.min_p is None else self._mask_min_p(logits, batch.min_p)

    def _padded_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return rows ``[R, V]`` as ``[B, S + 1, V]``, padded by repeating the last row."""
        num_rows = self._num_drafts + 1
        if len(rows) == len(counts) * num_rows:
            return rows.view(len(counts), num_rows, -1)
        firsts = (counts + 1).cumsum(0) - counts - 1
        offsets = torch.arange(num_rows, device=counts.device)
        return rows[firsts[:, None] + torch.minimum(offsets, counts[:, None])]
