"""Penalties and token sampling.

B sequences, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.sampling._noise import gumbel_noise
from interposer_ops.sampling._truncation import temper, truncation_threshold

_op = partial(standard_op, cases="interposer_ops.sampling._sampling_cases")


@_op(
    "apply_penalties",
    batch_invariant=True,
    tolerance=Tolerance(roundings=4),
    batched=("logits", "prompt_mask", "output_counts", "repetition", "presence", "frequency"),
)
def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Apply repetition, presence and frequency penalties.

    The repetition penalty comes first and applies to tokens of prompt and output: a positive logit
    is divided by the penalty, a negative logit multiplied. Then, for the output only:
    y = logit - presence * [count > 0] - frequency * count.

    Args:
        logits: ``[B, V]``, any float dtype.
        prompt_mask: ``[B, V]`` bool, the tokens of the prompt.
        output_counts: ``[B, V]`` int32 or int64, number of times that each token was generated.
        repetition: ``[B]`` float32, positive; 1 changes nothing.
        presence: ``[B]`` float32; 0 changes nothing.
        frequency: ``[B]`` float32; 0 changes nothing.
    Returns: ``[B, V]`` float32, or float64 for float64 ``logits``.
    Dims: vocab_size, counts_dtype: of ``output_counts``.
    Source: arXiv:1909.05858 (repetition), the OpenAI API (presence, frequency).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    y = logits.to(wide)
    factor = repetition.to(wide)[:, None]
    generated = output_counts > 0
    repeated = torch.where(y > 0, y / factor, y * factor)
    y = torch.where(prompt_mask | generated, repeated, y)
    y = y - presence.to(wide)[:, None] * generated
    return y - frequency.to(wide)[:, None] * output_counts


@_op(
    "sample_tokens",
    tolerance=Tolerance(roundings=4),
    batched=("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "steps"),
)
def sample_tokens(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    steps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, greedily or at random, and return its log probability.

    A row of temperature 0 takes the token of the largest logit. Other rows are divided by their
    temperature and truncated by top-k, top-p and min-p in this order (see
    ``truncation_threshold``); the token with the largest logit + Gumbel noise is a draw from the
    softmax. The noise depends only on seed, step and token (see ``gumbel_noise``). The lowest index
    wins ties.

    Args:
        logits: ``[B, V]``, any float dtype; each row has a finite logit and no NaN or +inf.
        temperature: ``[B]`` float32, not negative; None means 0 for all rows, and no other
            parameter is read.
        top_k: ``[B]`` int64, not negative; 0 keeps all tokens; None disables top-k.
        top_p: ``[B]`` float32, in [0, 1]; 1 keeps all tokens; None disables top-p.
        min_p: ``[B]`` float32, in [0, 1]; 0 keeps all tokens; None disables min-p.
        seeds: ``[B]`` int64, seed of the request.
        steps: ``[B]`` int64, number of tokens that the request has generated.
    Returns: ``(tokens, logprobs)``: ``[B]`` int64, and ``[B]`` float32 (float64 for float64
        ``logits``), the natural log of the token's probability under softmax(``logits``), before
        temperature and truncation.
    Dims: vocab_size.
    Source: arXiv:1411.0030 (Gumbel-max), arXiv:1805.04833 (top-k), arXiv:1904.09751 (top-p),
        arXiv:2407.01082 (min-p).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is None:
        tokens = logits.argmax(-1)
    else:
        scaled = temper(wide, temperature)
        is_kept = scaled >= truncation_threshold(scaled, top_k, top_p, min_p)
        noise = gumbel_noise(seeds, steps, logits.shape[-1], wide.dtype)
        # Greedy rows get no noise: the argmax then takes the largest logit.
        noise = torch.where(temperature[:, None] > 0, noise, 0)
        tokens = torch.where(is_kept, scaled + noise, float("-inf")).argmax(-1)
    chosen = wide.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, chosen - wide.logsumexp(-1)


@_op(
    "gumbel_argmax",
    tolerance=Tolerance(roundings=0),
    batched=("logits", "temperature", "seeds", "steps"),
)
def gumbel_argmax(logits: Tensor, temperature: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """Draw one token per row from softmax(logits / temperature).

    Equal to ``sample_tokens`` without truncation: the token with the largest logit / temperature +
    ``gumbel_noise``, or the largest logit if the temperature is 0; the lowest index wins ties.

    Args:
        logits: as in ``sample_tokens``; rows need not be adjacent.
        temperature: ``[B]`` float32, not negative.
        seeds, steps: as in ``sample_tokens``.
    Returns: ``[B]`` int64.
    Dims: vocab_size.
    Source: arXiv:1411.0030.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    noise = gumbel_noise(seeds, steps, logits.shape[-1], wide.dtype)
    # Greedy rows get no noise: the argmax then takes the largest logit.
    noise = torch.where(temperature[:, None] > 0, noise, 0)
    return (temper(wide, temperature) + noise).argmax(-1)
