"""Normalisation with a gate, as state space layers and linear attention end. H hidden size."""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op

_CASES = "interposer_ops.norms._gated_norms_cases"


# As rms_norm: the normalised row, its product and the result may each be rounded.
@standard_op(
    "gated_rms_norm",
    cases=_CASES,
    constants=("weight",),
    tolerance=Tolerance(roundings=3),
    batched=("x", "gate"),
)
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    """Scale each group of a row to unit root mean square and gate it by SiLU.

    With n(v) = v / sqrt(mean(v^2) + eps) over each group of ``group_size`` elements:
    y = n(x) * weight * silu(gate) if ``norm_before_gate``, else n(x * silu(gate)) * weight, in
    float32 or wider.

    Args:
        x: ``[..., H]``, any float dtype; rows may lie apart, here and in ``gate``.
        gate: shape and dtype of ``x``.
        weight: ``[H]``, dtype of ``x``.
        group_size: divides H; H itself for one statistic per row.
    Returns: shape and dtype of ``x``.
    Dims: hidden_size, group_size, norm_before_gate.
    Source: arXiv:2405.21060 (Mamba-2); arXiv:2412.06464 (Gated DeltaNet) for the norm first.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, opening = x.to(dtype), functional.silu(gate.to(dtype))
    if norm_before_gate:
        y = _normalise(wide, eps, group_size) * weight * opening
    else:
        y = _normalise(wide * opening, eps, group_size) * weight
    return y.to(x.dtype)


def _normalise(wide: torch.Tensor, eps: float, group_size: int) -> torch.Tensor:
    groups = wide.unflatten(-1, (wide.shape[-1] // group_size, group_size))
    unit: torch.Tensor = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return unit.flatten(-2)
