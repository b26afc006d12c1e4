"""Log probabilities of chosen and of likely tokens. Dimensions: B sequences, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op

_CASES = "interposer_ops.sampling._logprobs_cases"


@standard_op(
    "token_logprobs", cases=_CASES, tolerance=Tolerance(roundings=4), batched=("logits", "tokens")
)
def token_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log probability and the rank of one token per row, and those likeliest.

    logprob = logits - logsumexp(logits), in float32 or wider. Tokens are ranked by their logits,
    so that no rounding decides; the lowest id comes first among equals.

    Args:
        logits: ``[B, V]``, any float dtype, in each row one at least finite and none NaN or +inf;
            rows may lie apart.
        tokens: ``[B]`` int64.
        num_top: how many of the likeliest tokens to return, from 0 to V.
    Returns: ``(logprobs, ranks, top_logprobs, top_ids)``: ``[B]`` float32 (float64 for float64
        ``logits``), natural logs; ``[B]`` int64, 1 and the number of tokens that are likelier;
        ``[B, num_top]`` of the dtype of ``logprobs``, descending; ``[B, num_top]`` int64.
    Dims: vocab_size, num_top.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = wide.logsumexp(-1, keepdim=True)
    chosen = wide.gather(-1, tokens[:, None])
    ranks = (wide > chosen).sum(-1) + 1
    ordered, order = wide.sort(dim=-1, descending=True, stable=True)
    top = ordered[:, :num_top] - total
    return (chosen - total).squeeze(-1), ranks, top, order[:, :num_top].contiguous()
