"""Edits of logits before sampling (bias, minimum length, grammar mask), and top log probabilities.

Dimensions: B sequences, V vocabulary, M listed tokens, N likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from interposer import CustomOp, Site
from interposer_ops.layers import MOST_LIKELY
from interposer_ops.sampling._logit_masks import (
    apply_logit_bias,
    apply_token_bitmask,
    suppress_tokens_until,
)
from interposer_ops.sampling._logprobs import token_logprobs

__all__ = ["MOST_LIKELY", "LogitEditor", "LogitEdits"]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Arguments of the logit-editing ops, without the logits; None: no request uses the edit.

    Attributes:
        bias: token ids and values of ``apply_logit_bias``.
        least: steps, minimum numbers of tokens and stop ids of ``suppress_tokens_until``.
        bitmask: mask of ``apply_token_bitmask``.
        columns: ops that take one value per row, with the values ``[B]`` of each op; applied last,
            in this order.
    """

    bias: tuple[Tensor, Tensor] | None = None
    least: tuple[Tensor, Tensor, Tensor] | None = None
    bitmask: Tensor | None = None
    columns: tuple[tuple[CustomOp[..., Tensor], Tensor], ...] = ()


class LogitEditor:
    """Kernels that edit logits; each kernel is bound when the first request needs it."""

    def __init__(self, site: Site, vocab_size: int) -> None:
        self._site = site
        self._vocab_size = vocab_size
        self._bound: dict[tuple[str, torch.dtype], Callable[..., Any]] = {}

    def prepare(
        self,
        *,
        bias: bool = False,
        least: bool = False,
        bitmask: bool = False,
        top: bool = False,
        ops: Iterable[CustomOp[..., Tensor]] = (),
    ) -> None:
        """Bind the kernels of a new request now, so that no later step fails for lack of a kernel.

        Args:
            ops: ops of ``LogitEdits.columns``.
        Raises: InterposerError: the policy excludes every kernel, or names an unknown kernel.
        """
        if bias:
            self._bias()
        if least:
            self._least()
        if bitmask:
            self._bitmask()
        for op in ops:
            self._kernel(op)
        if top:
            # Logits are in the model's dtype, or wider after penalties.
            for dtype in {self._site.dtype, torch.promote_types(self._site.dtype, torch.float32)}:
                self._top(dtype)

    def edit(self, logits: Tensor, edits: LogitEdits) -> Tensor:
        """Apply ``edits`` to logits ``[B, V]``; rows without edits are unchanged."""
        if edits.bias is not None:
            logits = self._bias()(logits, *edits.bias)
        if edits.least is not None:
            logits = self._least()(logits, *edits.least)
        if edits.bitmask is not None:
            logits = self._bitmask()(logits, edits.bitmask)
        for op, values in edits.columns:
            logits = self._kernel(op)(logits, values)
        return logits

    def top(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute log probabilities and ranks of ``tokens``, and the likeliest tokens of each row.

        Args:
            logits: ``[B, V]``, dtype of the site or the wider dtype of penalised logits.
            tokens: ``[B]`` int64.
        Returns: log probabilities ``[B]`` and ranks ``[B]`` of ``tokens``; log probabilities ``[B,
            N]``, descending, and ids ``[B, N]`` of the likeliest tokens. N is ``MOST_LIKELY`` or V.
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
        # Kernels are bound per dtype, as penalised logits are wider.
        key = op.name, dtype or self._site.dtype
        if key not in self._bound:
            site = replace(self._site, dtype=key[1])
            self._bound[key] = site.bind(op, vocab_size=self._vocab_size, **dims)
        return self._bound[key]
