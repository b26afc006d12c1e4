"""Ops that edit logits before sampling: bias, masks, temperature, softcap and truncation.

T tokens, B sequences, V vocabulary, M listed tokens; shorter lists are padded with -1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.sampling._truncation import truncation_threshold

_op = partial(standard_op, cases="interposer_ops.sampling._logit_masks_cases")
_exact = partial(_op, tolerance=Tolerance(roundings=0))

_WORD = 32  # tokens per word of a bit mask


@_op(
    "apply_logit_bias", tolerance=Tolerance(roundings=1), batched=("logits", "token_ids", "values")
)
def apply_logit_bias(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Add a value to the logit of each listed token.

    Args:
        logits: ``[B, V]``, any float dtype; rows need not be adjacent.
        token_ids: ``[B, M]`` int32 or int64, from -1 to V - 1, no token twice in a row.
        values: ``[B, M]`` float32; minus infinity masks a token.
    Returns: ``[B, V]``, dtype of ``logits``; the sum is computed in float32 or wider.
    Dims: vocab_size, index_dtype: of ``token_ids``.
    Source: the OpenAI API (``logit_bias``).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    batch_size, vocab_size = logits.shape
    # The extra column takes the values of padding (-1), which are cut off below.
    bias = torch.zeros(batch_size, vocab_size + 1, dtype=wide, device=logits.device)
    bias = bias.scatter(1, _columns(token_ids, vocab_size), values.to(wide))
    return (logits.to(wide) + bias[:, :vocab_size]).to(logits.dtype)


@_exact("apply_token_bitmask", batched=("logits", "bitmask"))
def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Mask the tokens whose bit is 0, for grammar-constrained decoding.

    The bit of token v is bit v mod 32, counted from the lowest, of word v / 32. Bits beyond the
    vocabulary are not read.

    Args:
        logits: ``[B, V]``, any float dtype; rows need not be adjacent.
        bitmask: ``[B, ceil(V / 32)]`` int32; rows need not be adjacent.
    Returns: ``[B, V]``, dtype of ``logits``, minus infinity where a token is masked.
    Dims: vocab_size.
    Source: the token bit masks of xgrammar and of llguidance.
    """
    bits = torch.arange(_WORD, dtype=torch.int32, device=bitmask.device)
    # The last word may have bits beyond the vocabulary.
    allowed = ((bitmask[..., None] >> bits) & 1).bool().flatten(-2)[:, : logits.shape[1]]
    return torch.where(allowed, logits, float("-inf"))


@_exact("suppress_tokens_until", batched=("logits", "steps", "min_tokens", "stop_ids"))
def suppress_tokens_until(
    logits: Tensor, steps: Tensor, min_tokens: Tensor, stop_ids: Tensor
) -> Tensor:
    """Mask the stop tokens of requests that have generated fewer than ``min_tokens`` tokens.

    Args:
        logits: ``[B, V]``, any float dtype; rows need not be adjacent.
        steps: ``[B]`` int64, number of tokens that the request has generated.
        min_tokens: ``[B]`` int64; stop tokens are masked where ``steps`` is less.
        stop_ids: ``[B, M]`` int32 or int64, from -1 to V - 1.
    Returns: ``[B, V]``, dtype of ``logits``.
    Dims: vocab_size, index_dtype: of ``stop_ids``.
    """
    batch_size, vocab_size = logits.shape
    stops = torch.zeros(batch_size, vocab_size + 1, dtype=torch.bool, device=logits.device)
    stops = stops.scatter(1, _columns(stop_ids, vocab_size), True)[:, :vocab_size]
    return logits.masked_fill(stops & (steps < min_tokens)[:, None], float("-inf"))


@_op("apply_temperature", tolerance=Tolerance(roundings=2), batched=("logits", "temperature"))
def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide each row by its temperature; a row of temperature 0 (greedy) stays unchanged.

    Args:
        logits: ``[B, V]``, any float dtype; rows need not be adjacent.
        temperature: ``[B]`` float32, not negative.
    Returns: ``[B, V]`` float32, or float64 for float64 ``logits``.
    Dims: vocab_size.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    divisor = torch.where(temperature > 0, temperature, 1).to(wide)
    return logits.to(wide) / divisor[:, None]


@standard_op(
    "logits_softcap",
    cases="interposer_ops.sampling._logits_cases",
    tolerance=Tolerance(roundings=1),
    batched=("logits",),
)
def logits_softcap(logits: Tensor, cap: float) -> Tensor:
    """Limit ``logits`` smoothly to (-cap, cap): y = cap tanh(x / cap), in float32 or wider.

    Args:
        logits: ``[T, V]``, any float dtype; rows need not be adjacent.
        cap: positive.
    Returns: ``[T, V]``, dtype of ``logits``.
    Dims: vocab_size.
    Source: arXiv:2408.00118.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (cap * (wide / cap).tanh()).to(logits.dtype)


@_exact("mask_top_k_top_p", batched=("logits", "top_k", "top_p"))
def mask_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Mask the tokens that top-k and then top-p drop, see ``truncation_threshold``.

    Equal tokens are kept or dropped together; the likeliest token is always kept.

    Args:
        logits: ``[B, V]``, any float dtype; each row has a finite logit and no NaN or +inf. Rows
            need not be adjacent.
        top_k: ``[B]`` int64, not negative; 0 keeps all tokens; None disables top-k.
        top_p: ``[B]`` float32, in [0, 1]; 1 keeps all tokens; None disables top-p.
    Returns: ``[B, V]``, dtype of ``logits``, minus infinity where a token is masked.
    Dims: vocab_size.
    Source: arXiv:1805.04833 (top-k), arXiv:1904.09751 (top-p).
    """
    return _mask_truncated(logits, top_k, top_p, None)


@_exact("mask_min_p", batched=("logits", "min_p"))
def mask_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Mask the tokens that are less than ``min_p`` times as likely as the likeliest token.

    Args:
        logits: as in ``mask_top_k_top_p``.
        min_p: ``[B]`` float32, in [0, 1]; 0 keeps all tokens.
    Returns: ``[B, V]``, dtype of ``logits``, minus infinity where a token is masked.
    Dims: vocab_size.
    Source: arXiv:2407.01082.
    """
    return _mask_truncated(logits, None, None, min_p)


def _columns(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return column numbers of tokens; padding (-1) becomes an extra column ``vocab_size``."""
    return torch.where(token_ids >= 0, token_ids, vocab_size).to(torch.int64)


def _mask_truncated(
    logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = wide - wide.amax(-1, keepdim=True)
    is_kept = scaled >= truncation_threshold(scaled, top_k, top_p, min_p)
    return torch.where(is_kept, logits, float("-inf"))
