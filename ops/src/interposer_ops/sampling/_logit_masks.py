"""Logits that are capped or scaled, and tokens that are ruled out or favoured.

Dimensions: T tokens, B sequences, V vocabulary, M listed tokens. A list that is shorter than M is
filled up with -1.
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

_WORD = 32  # tokens in a word of a bit mask


@_op(
    "apply_logit_bias", tolerance=Tolerance(roundings=1), batched=("logits", "token_ids", "values")
)
def apply_logit_bias(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Add a value to the logit of each listed token.

    Args:
        logits: ``[B, V]``, any float dtype; rows may lie apart.
        token_ids: ``[B, M]`` int32 or int64, from -1 to V - 1, no token twice in a row.
        values: ``[B, M]`` float32; minus infinity rules a token out.
    Returns: ``[B, V]``, dtype of ``logits``; the sum is computed in float32 or wider.
    Dims: vocab_size, index_dtype: of ``token_ids``.
    Source: the OpenAI API (``logit_bias``).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    batch_size, vocab_size = logits.shape
    bias = torch.zeros(batch_size, vocab_size + 1, dtype=wide, device=logits.device)
    bias = bias.scatter(1, _places(token_ids, vocab_size), values.to(wide))
    return (logits.to(wide) + bias[:, :vocab_size]).to(logits.dtype)


@_exact("apply_token_bitmask", batched=("logits", "bitmask"))
def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Rule out the tokens whose bit is 0, as grammars do.

    The bit of token v is bit v mod 32, counted from the lowest, of word v / 32. Bits beyond the
    vocabulary are not read.

    Args:
        logits: ``[B, V]``, any float dtype; rows may lie apart.
        bitmask: ``[B, ceil(V / 32)]`` int32; rows may lie apart.
    Returns: ``[B, V]``, dtype of ``logits``, minus infinity where a token is ruled out.
    Dims: vocab_size.
    Source: the token bit masks of xgrammar and of llguidance.
    """
    bits = torch.arange(_WORD, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[..., None] >> bits) & 1).bool().flatten(-2)[:, : logits.shape[1]]
    return torch.where(allowed, logits, float("-inf"))


@_exact("suppress_tokens_until", batched=("logits", "steps", "min_tokens", "stop_ids"))
def suppress_tokens_until(
    logits: Tensor, steps: Tensor, min_tokens: Tensor, stop_ids: Tensor
) -> Tensor:
    """Rule out a request's stop tokens until it has generated its least number of tokens.

    Args:
        logits: ``[B, V]``, any float dtype; rows may lie apart.
        steps: ``[B]`` int64, how many tokens the request generated before.
        min_tokens: ``[B]`` int64; stop tokens are ruled out where ``steps`` is less.
        stop_ids: ``[B, M]`` int32 or int64, from -1 to V - 1.
    Returns: ``[B, V]``, dtype of ``logits``.
    Dims: vocab_size, index_dtype: of ``stop_ids``.
    """
    batch_size, vocab_size = logits.shape
    stops = torch.zeros(batch_size, vocab_size + 1, dtype=torch.bool, device=logits.device)
    stops = stops.scatter(1, _places(stop_ids, vocab_size), True)[:, :vocab_size]
    return logits.masked_fill(stops & (steps < min_tokens)[:, None], float("-inf"))


@_op("apply_temperature", tolerance=Tolerance(roundings=2), batched=("logits", "temperature"))
def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide each row by its temperature; one of temperature 0, which is greedy, is left alone.

    Args:
        logits: ``[B, V]``, any float dtype; rows may lie apart.
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
    """Keep ``logits`` between -cap and cap: y = cap tanh(x / cap), in float32 or wider.

    Args:
        logits: ``[T, V]``, any float dtype; rows may skip memory.
        cap: positive.
    Returns: ``[T, V]``, dtype of ``logits``.
    Dims: vocab_size.
    Source: arXiv:2408.00118.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (cap * (wide / cap).tanh()).to(logits.dtype)


@_exact("mask_top_k_top_p", batched=("logits", "top_k", "top_p"))
def mask_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Rule out what top-k drops, then what top-p drops of the rest (``truncation_threshold``).

    Equal tokens are kept or dropped together, and the likeliest is always kept.

    Args:
        logits: ``[B, V]``, any float dtype, in each row one at least finite and none NaN or +inf;
            rows may lie apart.
        top_k: ``[B]`` int64, not negative; 0 keeps all tokens, None all in every row.
        top_p: ``[B]`` float32, in [0, 1]; 1 keeps all tokens, None all in every row.
    Returns: ``[B, V]``, dtype of ``logits``, minus infinity where a token is ruled out.
    Dims: vocab_size.
    Source: arXiv:1805.04833 (top-k), arXiv:1904.09751 (top-p).
    """
    return _truncated(logits, top_k, top_p, None)


@_exact("mask_min_p", batched=("logits", "min_p"))
def mask_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Rule out each token that is less than ``min_p`` times as likely as the likeliest one.

    Args:
        logits: as in ``mask_top_k_top_p``.
        min_p: ``[B]`` float32, in [0, 1]; 0 keeps all tokens.
    Returns: ``[B, V]``, dtype of ``logits``, minus infinity where a token is ruled out.
    Dims: vocab_size.
    Source: arXiv:2407.01082.
    """
    return _truncated(logits, None, None, min_p)


def _places(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return the columns of tokens in rows that have one more, for what is no token."""
    return torch.where(token_ids >= 0, token_ids, vocab_size).to(torch.int64)


def _truncated(
    logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = wide - wide.amax(-1, keepdim=True)
    kept = scaled >= truncation_threshold(scaled, top_k, top_p, min_p)
    return torch.where(kept, logits, float("-inf"))
