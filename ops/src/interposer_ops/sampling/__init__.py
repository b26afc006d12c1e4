"""Sampling ops: logit masks, penalties, temperature, truncation, draws, draft verification.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.sampling._logit_masks import (
        apply_logit_bias,
        apply_temperature,
        apply_token_bitmask,
        logits_softcap,
        mask_min_p,
        mask_top_k_top_p,
        suppress_tokens_until,
    )
    from interposer_ops.sampling._logprobs import token_logprobs
    from interposer_ops.sampling._noise import gumbel_noise, uniform_noise
    from interposer_ops.sampling._sampling import apply_penalties, gumbel_argmax, sample_tokens
    from interposer_ops.sampling._speculative import greedy_verify, rejection_sample
    from interposer_ops.sampling._truncation import temper, truncation_threshold

# fmt: off
__all__ = [
    "apply_logit_bias", "apply_penalties", "apply_temperature", "apply_token_bitmask",
    "greedy_verify", "gumbel_argmax", "gumbel_noise", "logits_softcap", "mask_min_p",
    "mask_top_k_top_p", "rejection_sample", "sample_tokens", "suppress_tokens_until", "temper",
    "token_logprobs", "truncation_threshold", "uniform_noise",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.sampling._logit_masks": (
            "apply_logit_bias apply_temperature apply_token_bitmask logits_softcap mask_min_p "
            "mask_top_k_top_p suppress_tokens_until"
        ),
        "interposer_ops.sampling._logprobs": "token_logprobs",
        "interposer_ops.sampling._noise": "gumbel_noise uniform_noise",
        "interposer_ops.sampling._sampling": "apply_penalties gumbel_argmax sample_tokens",
        "interposer_ops.sampling._speculative": "greedy_verify rejection_sample",
        "interposer_ops.sampling._truncation": "temper truncation_threshold",
    },
)


def __dir__() -> list[str]:
    return __all__
