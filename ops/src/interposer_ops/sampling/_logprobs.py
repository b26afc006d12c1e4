"""Log probabilities of chosen tokens and of the likeliest tokens.

B sequences, V vocabulary.
"""

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
    """Return the log probability and rank of one token per row, and the likeliest tokens.

    logprob = logits - logsumexp(logits), in float32 or wider. Tokens are ranked by logit, which no
    rounding affects; the lowest id comes first among equals.

    Args:
        logits: ``[B, V]``, any float dtype; each row has a finite logit and no NaN or +inf. Rows
            need not be adjacent.
        tokens: ``[B]`` int64.
        num_top: number of likeliest tokens to return, from 0 to V.
    Returns: ``(logprobs, ranks, top_logprobs, top_ids)``: ``[B]`` float32 (float64 for float64
        ``logits``), natural logs; ``[B]`` int64, 1 + the number of likelier tokens;
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
