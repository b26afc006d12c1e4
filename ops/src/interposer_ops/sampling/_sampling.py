"""From logits to tokens. Dimensions: B sequences, V vocabulary."""

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
    """Make tokens that were already used less likely, or more likely.

    Repetition comes first and counts prompt and output: of a used token, a positive logit is
    divided and a negative one multiplied. Then, for the output alone:
    y = logit - presence * [count > 0] - frequency * count.

    Args:
        logits: ``[B, V]``, any float dtype.
        prompt_mask: ``[B, V]`` bool, the tokens of the prompt.
        output_counts: ``[B, V]`` int32 or int64, how often each token was generated.
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
    """Choose one token per row, greedily or at random.

    A row of temperature 0 takes its largest logit. Any other is divided by its temperature, cut
    by top-k, top-p and min-p in this order (see ``truncation_threshold``), and the token with
    the largest sum of what is kept and Gumbel noise is taken: a draw from the softmax. The noise
    depends on seed, step and token alone (see ``gumbel_noise``). The lowest index wins ties.

    Args:
        logits: ``[B, V]``, any float dtype, in each row one at least finite and none NaN or +inf.
        temperature: ``[B]`` float32, not negative; None is 0 in every row, and only ``logits``
            are read.
        top_k: ``[B]`` int64, not negative; 0 keeps all tokens, None all in every row.
        top_p: ``[B]`` float32, in [0, 1]; 1 keeps all tokens, None all in every row.
        min_p: ``[B]`` float32, in [0, 1]; 0 keeps all tokens, None all in every row.
        seeds: ``[B]`` int64, of the request.
        steps: ``[B]`` int64, how many tokens the request generated before.
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
        kept = scaled >= truncation_threshold(scaled, top_k, top_p, min_p)
        noise = gumbel_noise(seeds, steps, logits.shape[-1], wide.dtype)
        noise = torch.where(temperature[:, None] > 0, noise, 0)
        tokens = torch.where(kept, scaled + noise, float("-inf")).argmax(-1)
    chosen = wide.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, chosen - wide.logsumexp(-1)


@_op(
    "gumbel_argmax",
    tolerance=Tolerance(roundings=0),
    batched=("logits", "temperature", "seeds", "steps"),
)
def gumbel_argmax(logits: Tensor, temperature: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """Draw one token per row from the softmax of its tempered logits.

    The token of ``sample_tokens`` without truncation: the largest sum of logit / temperature and
    ``gumbel_noise``, the largest logit where the temperature is 0; the lowest index wins ties.

    Args:
        logits: as in ``sample_tokens``; rows may lie apart.
        temperature: ``[B]`` float32, not negative.
        seeds, steps: as in ``sample_tokens``.
    Returns: ``[B]`` int64.
    Dims: vocab_size.
    Source: arXiv:1411.0030.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    noise = gumbel_noise(seeds, steps, logits.shape[-1], wide.dtype)
    noise = torch.where(temperature[:, None] > 0, noise, 0)
    return (temper(wide, temperature) + noise).argmax(-1)
