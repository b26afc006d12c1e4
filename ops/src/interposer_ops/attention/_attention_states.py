"""Attention to parts of the keys, joined. T tokens, N heads, E size of a value."""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op

_CASES = "interposer_ops.attention._attention_states_cases"


@standard_op(
    "merge_attention_states",
    cases=_CASES,
    tolerance=Tolerance(roundings=2),
    batched=("out_a", "lse_a", "out_b", "lse_b"),
)
def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to the keys of both sides from what each side's keys gave.

    lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b, in
    float32 or wider. A side without keys has an lse of -inf and adds nothing; where both have none
    the result is zero, with an lse of -inf. Tokens of every argument may lie apart in memory.

    Args:
        out_a: ``[T, N, E]``, any float dtype, finite.
        lse_a: ``[T, N]``, float32 or wider, finite or -inf.
        out_b: ``[T, N, E]``, dtype of ``out_a``, finite.
        lse_b: ``[T, N]``, dtype of ``lse_a``, finite or -inf.
    Returns: ``[T, N, E]``, dtype of ``out_a``; ``[T, N]``, dtype of ``lse_a``.
    Dims: num_heads, value_size.
    Source: arXiv:2501.01005.
    """
    largest = torch.maximum(lse_a, lse_b)
    largest = torch.where(largest == -torch.inf, 0, largest)
    weight_a, weight_b = (torch.exp(lse - largest) for lse in (lse_a, lse_b))
    total = weight_a + weight_b  # 0 without keys, else at least 1
    wide = torch.promote_types(out_a.dtype, lse_a.dtype)
    mixed = weight_a[..., None] * out_a.to(wide) + weight_b[..., None] * out_b.to(wide)
    return (mixed / total.clamp(min=1)[..., None]).to(out_a.dtype), largest + total.log()
