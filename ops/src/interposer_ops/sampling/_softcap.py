"""Capping of logits. T tokens, V vocabulary size."""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op

_CASES = "interposer_ops.sampling._softcap_cases"


@standard_op("logits_softcap", cases=_CASES, tolerance=Tolerance(roundings=1), batched=("logits",))
def logits_softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
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
