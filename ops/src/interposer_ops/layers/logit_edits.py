"""Edits of logits before a token is drawn, and the likeliest tokens in its place.

Dimensions: B sequences, V vocabulary, M listed tokens, N likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from interposer import CustomOp, Site
from interposer_ops.sampling._logit_masks import (
    apply_logit_bias,
    apply_token_bitmask,
    suppress_tokens_until,
)
from interposer_ops.sampling._logprobs import token_logprobs

__all__ = ["MOST_LIKELY", "LogitEditor", "LogitEdits"]

MOST_LIKELY = 20
"""Tokens that a request may ask for at most at each position, as in the OpenAI API."""


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The arguments of the ops besides the logits; None stands for what no request uses.

    Attributes:
        bias: token ids and values of ``apply_logit_bias``.
        least: steps, least numbers of tokens and stop ids of ``suppress_tokens_until``.
        bitmask: of ``apply_token_bitmask``.
    """

    bias: tuple[Tensor, Tensor] | None = None
    least: tuple[Tensor, Tensor, Tensor] | None = None
    bitmask: Tensor | None = None


class LogitEditor:
    """Kernels that few requests need, each bound when the first one does."""

    def __init__(self, site: Site, vocab_size: int) -> None:
        self._site = site
        self._vocab_size = vocab_size
        self._bound: dict[tuple[str, torch.dtype], Callable[..., Any]] = {}

    def prepare(
        self, *, bias: bool = False, least: bool = False, bitmask: bool = False, top: bool = False
    ) -> None:
        """Bind what a request will need, so that no step fails for want of a kernel.

        Raises: InterposerError: the policy leaves none, or names one that is unknown.
        """
        if bias:
            self._bias()
        if least:
            self._least()
        if bitmask:
            self._bitmask()
        if top:
            for dtype in {self._site.dtype, torch.promote_types(self._site.dtype, torch.float32)}:
                self._top(dtype)

    def edit(self, logits: Tensor, edits: LogitEdits) -> Tensor:
        """Return ``[B, V]`` logits as requests want them; rows that want nothing are equal."""
        if edits.bias is not None:
            logits = self._bias()(logits, *edits.bias)
        if edits.least is not None:
            logits = self._least()(logits, *edits.least)
        if edits.bitmask is not None:
            logits = self._bitmask()(logits, edits.bitmask)
        return logits

    def top(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log probabilities and ranks of ``tokens``, and those of the likeliest, with ids.

        Args:
            logits: ``[B, V]``, dtype of the site or the wider one of penalised logits.
            tokens: ``[B]`` int64.
        Returns: ``[B]``, ``[B]``, ``[B, N]`` descending, ``[B, N]``; N is ``MOST_LIKELY`` or V.
        """
        return self._top(logits.dtype)(logits, tokens, self._num_top)

    @property
    def _num_top(self) -> int:
        return min(MOST_LIKELY, self._vocab_size)

    def _bias(self) -> Callable[..., Tensor]:
        return self._kernel(apply_logit_bias, index_dtype="int64")

    def _least(self) -> Callable[..., Tensor]:
        return self._kernel(suppress_tokens_until, index_dtype="int64")

    def _bitmask(self) -> Callable[..., Tensor]:
        return self._kernel(apply_token_bitmask)

    def _top(self, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
        return self._kernel(token_logprobs, dtype, num_top=self._num_top)

    def _kernel(
        self, op: CustomOp[..., Any], dtype: torch.dtype | None = None, **dims: int | str
    ) -> Callable[..., Any]:
        key = op.name, dtype or self._site.dtype
        if key not in self._bound:
            site = replace(self._site, dtype=key[1])
            self._bound[key] = site.bind(op, vocab_size=self._vocab_size, **dims)
        return self._bound[key]
