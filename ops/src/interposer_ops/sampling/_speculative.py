"""Verification of drafted tokens. Dimensions: B sequences, S drafted tokens at most, V vocabulary.

A row with n drafted tokens yields those that are accepted and one more, which takes the place of
the first that is rejected or follows them all: 1 to n + 1 tokens.
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
    """Accept drafted tokens as long as they are those that greedy decoding takes.

    The lowest index wins ties, as in ``sample_tokens``.

    Args:
        draft_tokens: ``[B, S]`` int64; what stands behind a row's drafts is not read.
        target_logits: ``[B, S + 1, V]``, any float dtype, at the place of each drafted token and
            of the one behind them; none NaN where a row has drafts or at the place behind them.
        num_draft: ``[B]`` int64, from 0 to S.
    Returns: ``(tokens, accepted)``: ``[B, S + 1]`` int64, -1 behind the last token; ``[B]`` int64,
        how many drafted tokens were accepted.
    Dims: vocab_size, num_draft_tokens.
    Source: arXiv:2211.17192.
    """
    best = target_logits.argmax(-1)
    return _verified(draft_tokens, draft_tokens == best[:, :-1], best, num_draft)


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
    """Accept or replace drafted tokens so that all tokens are drawn from the target distribution.

    At draft i of n, with q the distribution that the token x was drawn from and p the target's:
    x is accepted if all before it were and u q(x) < p(x). At the first that is not, a token is
    drawn from max(p - q, 0), or from p if that is zero everywhere, which rounding may cause; and
    from p behind n accepted ones. All is computed in float32 or wider.

    A draw takes the largest sum of log weight and Gumbel noise, the lowest index among equals.
    Noise at place i is that of the row's seed and step + i: ``gumbel_noise`` of tokens 0 to V - 1
    for the draw, so that a row without drafts takes the token of ``sample_tokens``, and for u the
    ``uniform_noise`` of token V, on which no draw depends. Whoever drafts must use other noise.

    Args:
        draft_tokens, num_draft: as in ``greedy_verify``.
        draft_probs: ``[B, S, V]``, any float dtype; None where drafts were certain, q(x) = 1.
        target_probs: ``[B, S + 1, V]``, dtype of ``draft_probs``, after temperature and truncation.
        seeds, steps: as in ``sample_tokens``.
    Returns: those of ``greedy_verify``.
    Dims: vocab_size, num_draft_tokens, certain_drafts.
    Source: arXiv:2211.17192, algorithm 1; arXiv:2302.01318.
    """
    wide = torch.promote_types(target_probs.dtype, torch.float32)
    target = target_probs.to(wide)
    batch_size, places, vocab_size = target.shape
    offsets = torch.arange(places, device=target.device)
    seed_of = seeds[:, None].expand(-1, places).flatten()
    step_of = (steps[:, None] + offsets).flatten()

    drafted = offsets[:-1] < num_draft[:, None]
    read = torch.where(drafted, draft_tokens, 0)[..., None]
    if draft_probs is None:
        draft = torch.zeros_like(target[:, :-1]).scatter(-1, read, 1.0)
    else:
        draft = draft_probs.to(wide)
    uniform = uniform_noise(seed_of, step_of, vocab_size + 1)[:, vocab_size]
    uniform = uniform.view(batch_size, places)[:, :-1].to(wide)
    chance = target[:, :-1].gather(-1, read).squeeze(-1)
    is_accepted = uniform * draft.gather(-1, read).squeeze(-1) < chance

    rest = (target[:, :-1] - draft).clamp(min=0)
    replaced = drafted[..., None] & (rest > 0).any(-1, keepdim=True)
    rest = torch.where(replaced, rest, target[:, :-1])
    weights = torch.cat((rest, target[:, -1:]), 1)
    noise = gumbel_noise(seed_of, step_of, vocab_size, wide).view(weights.shape)
    drawn = (weights.log() + noise).argmax(-1)
    return _verified(draft_tokens, is_accepted, drawn, num_draft)


def _verified(
    draft_tokens: Tensor, is_accepted: Tensor, replacements: Tensor, num_draft: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the drafted tokens before the first that is not accepted, and its replacement."""
    places = torch.arange(replacements.shape[1], device=replacements.device)
    is_accepted = is_accepted & (places[:-1] < num_draft[:, None])
    accepted = is_accepted.to(torch.int64).cumprod(-1).sum(-1)
    drafts = torch.cat((draft_tokens, draft_tokens.new_zeros(draft_tokens.shape[0], 1)), 1)
    end = accepted[:, None]
    tokens = torch.where(places < end, drafts, torch.where(places == end, replacements, -1))
    return tokens, accepted
