"""Draws and verification of drafted tokens.

Dimensions: R rows of logits, B sequences, S drafted tokens at most, V vocabulary.
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
    """The ops of speculative decoding, which only an engine that drafts tokens binds.

    The distribution of a row is that of ``sample_tokens``: after temperature, top-k, top-p and
    min-p, in this order.
    """

    def __init__(self, site: Site, vocab_size: int, num_drafts: int, certain: bool) -> None:
        """Bind the ops.

        Args:
            num_drafts: S.
            certain: whoever drafts tokens has no distribution of them.
        Raises: InterposerError: the policy leaves no kernel for one of the ops.
        """
        drafts = {"vocab_size": vocab_size, "num_draft_tokens": num_drafts}
        wide = replace(site, dtype=torch.promote_types(site.dtype, torch.float32))

        def bound(op: CustomOp[..., Any]) -> Callable[..., Tensor]:
            return wide.bind(op, vocab_size=vocab_size)

        self._num_drafts = num_drafts
        self._wide = wide.dtype
        self._greedy_verify = site.bind(greedy_verify, **drafts)
        self._verify = wide.bind(rejection_sample, **drafts, certain_drafts=certain)
        self._temper = bound(apply_temperature)
        self._truncate = bound(mask_top_k_top_p)
        self._cut = bound(mask_min_p)
        self._draw = None if certain else bound(gumbel_argmax)

    def draw(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor | None]:
        """Return a token of each row of a draft's logits, and the distribution it was drawn from.

        Args:
            logits: ``[R, V]``, any float dtype.
        Returns: ``[R]`` int64, and ``[R, V]`` in float32 or wider; None where all are greedy.
        """
        if batch.temperature is None or self._draw is None:
            return logits.argmax(-1), None
        logits = self._tempered(logits, batch)
        # They are tempered already; those of temperature 0 take the largest.
        once = (batch.temperature > 0).to(torch.float32)
        return self._draw(logits, once, batch.seeds, batch.steps), logits.softmax(-1)

    def verify_greedy(self, drafts: Tensor, counts: Tensor, logits: Tensor) -> Tensor:
        """Return the tokens that greedy decoding takes, ``[B, S + 1]`` int64, -1 behind them.

        Args:
            drafts: ``[B, S]`` int64.
            counts: ``[B]`` int64, how many of them each row has.
            logits: ``[R, V]``, dtype of the site: of each row's newest token, then of its drafts.
        """
        return self._greedy_verify(drafts, self._placed(logits, counts), counts)[0]

    def verify(
        self,
        drafts: Tensor,
        counts: Tensor,
        logits: Tensor,
        batch: SamplingBatch,
        probs: Tensor | None,
    ) -> Tensor:
        """Return tokens that are drawn from the distributions of ``logits``, as ``verify_greedy``.

        Args:
            batch: of the R rows of logits, not all greedy.
            probs: ``[B, S, V]``, of the distributions that drafts were drawn from; None where they
                are certain.
        """
        target = self._placed(self._tempered(logits, batch).softmax(-1), counts)
        firsts = (counts + 1).cumsum(0) - counts - 1
        noise = batch.seeds[firsts], batch.steps[firsts]
        return self._verify(drafts, probs, target, counts, *noise)[0]

    def _tempered(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        logits = self._temper(logits.to(self._wide), batch.temperature)
        if batch.top_k is not None or batch.top_p is not None:
            logits = self._truncate(logits, batch.top_k, batch.top_p)
        return logits if batch.min_p is None else self._cut(logits, batch.min_p)

    def _placed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return rows ``[R, V]`` as ``[B, S + 1, V]``, filled up with the last ones."""
        places = self._num_drafts + 1
        if len(rows) == len(counts) * places:
            return rows.view(len(counts), places, -1)
        firsts = (counts + 1).cumsum(0) - counts - 1
        offsets = torch.arange(places, device=counts.device)
        return rows[firsts[:, None] + torch.minimum(offsets, counts[:, None])]
