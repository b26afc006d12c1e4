"""Verification of draft tokens for speculative decoding.

A row with n draft tokens yields 1 to n + 1 tokens: the accepted draft tokens, and one more token
that replaces the first rejected draft token or follows the last accepted one.

B sequences, S maximum draft tokens, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.sampling._noise import gumbel_noise, uniform_noise

_op = partial(
    standard_op,
    cases="interposer_ops.sampling._speculative_cases",
    tolerance=Tolerance(roundings=0),
)


@_op("greedy_verify", batched=("draft_tokens", "target_logits", "num_draft"))
def greedy_verify(
    draft_tokens: Tensor, target_logits: Tensor, num_draft: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept draft tokens up to the first one that differs from the greedy choice.

    The lowest index wins ties, as in ``sample_tokens``.

    Args:
        draft_tokens: ``[B, S]`` int64; elements after a row's draft tokens are not read.
        target_logits: ``[B, S + 1, V]``, any float dtype, at the position of each draft token and
            of the token after the last one; no NaN at these positions.
        num_draft: ``[B]`` int64, from 0 to S.
    Returns: ``(tokens, accepted)``: ``[B, S + 1]`` int64, -1 after the last token; ``[B]`` int64,
        the number of accepted draft tokens.
    Dims: vocab_size, num_draft_tokens.
    Source: arXiv:2211.17192.
    """
    best = target_logits.argmax(-1)
    return _assemble_tokens(draft_tokens, draft_tokens == best[:, :-1], best, num_draft)


@_op(
    "rejection_sample",
    batched=("draft_tokens", "draft_probs", "target_probs", "num_draft", "seeds", "steps"),
)
def rejection_sample(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    num_draft: Tensor,
    seeds: Tensor,
    steps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept or replace draft tokens so that all tokens have the target distribution.

    Let the draft token x at position i be drawn from the draft distribution q, and let p be the
    target distribution. x is accepted if all earlier draft tokens were and u q(x) < p(x). At the
    first rejected position, a token is drawn from the residual max(p - q, 0), or from p if rounding
    makes the residual zero. After n accepted tokens, a token is drawn from p. All steps are
    computed in float32 or wider.

    A draw takes the token with the largest log weight + Gumbel noise, and the lowest index among
    equals. The noise at position i is that of the row's seed and of step + i: ``gumbel_noise`` of
    tokens 0 to V - 1 for a draw, so that a row without draft tokens yields the token of
    ``sample_tokens``; ``uniform_noise`` of token V for u, independent of every draw. The proposer
    must use other noise.

    Args:
        draft_tokens, num_draft: as in ``greedy_verify``.
        draft_probs: ``[B, S, V]``, any float dtype; None for deterministic drafts, q(x) = 1.
        target_probs: ``[B, S + 1, V]``, dtype of ``draft_probs``, after temperature and truncation.
        seeds, steps: as in ``sample_tokens``.
    Returns: those of ``greedy_verify``.
    Dims: vocab_size, num_draft_tokens, certain_drafts.
    Source: arXiv:2211.17192, algorithm 1; arXiv:2302.01318.
    """
    wide = torch.promote_types(target_probs.dtype, torch.float32)
    target = target_probs.to(wide)
    batch_size, num_positions, vocab_size = target.shape
    offsets = torch.arange(num_positions, device=target.device)
    seed_of = seeds[:, None].expand(-1, num_positions).flatten()
    step_of = (steps[:, None] + offsets).flatten()

    drafted = offsets[:-1] < num_draft[:, None]
    # Elements after the draft tokens of a row may be any number, also no valid index for gather.
    valid_drafts = torch.where(drafted, draft_tokens, 0)[..., None]
    if draft_probs is None:
        draft = torch.zeros_like(target[:, :-1]).scatter(-1, valid_drafts, 1.0)
    else:
        draft = draft_probs.to(wide)
    # Token V is outside the vocabulary: its noise is independent of the noise of every draw.
    uniform = uniform_noise(seed_of, step_of, vocab_size + 1)[:, vocab_size]
    uniform = uniform.view(batch_size, num_positions)[:, :-1].to(wide)
    chance = target[:, :-1].gather(-1, valid_drafts).squeeze(-1)
    is_accepted = uniform * draft.gather(-1, valid_drafts).squeeze(-1) < chance

    residual = (target[:, :-1] - draft).clamp(min=0)
    # Without a residual the target distribution takes its place, as at the position after the
    # drafts.
    has_residual = drafted[..., None] & (residual > 0).any(-1, keepdim=True)
    residual = torch.where(has_residual, residual, target[:, :-1])
    weights = torch.cat((residual, target[:, -1:]), 1)
    noise = gumbel_noise(seed_of, step_of, vocab_size, wide).view(weights.shape)
    drawn = (weights.log() + noise).argmax(-1)
    return _assemble_tokens(draft_tokens, is_accepted, drawn, num_draft)


def _assemble_tokens(
    draft_tokens: Tensor, is_accepted: Tensor, replacements: Tensor, num_draft: Tensor
) -> tuple[Tensor, Tensor]:
    """Return accepted draft tokens with one replacement, padded with -1, and the counts."""
    positions = torch.arange(replacements.shape[1], device=replacements.device)
    is_accepted = is_accepted & (positions[:-1] < num_draft[:, None])
    accepted = is_accepted.to(torch.int64).cumprod(-1).sum(-1)
    drafts = torch.cat((draft_tokens, draft_tokens.new_zeros(draft_tokens.shape[0], 1)), 1)
    end = accepted[:, None]
    tokens = torch.where(positions < end, drafts, torch.where(positions == end, replacements, -1))
    return tokens, accepted
