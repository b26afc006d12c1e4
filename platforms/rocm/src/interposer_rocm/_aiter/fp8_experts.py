"""Experts of a mixture with weights of 8-bit floats by AITER, which rounds activations as well.

Weights go into tiles and, on gfx942, into the format of its hardware once, after they were loaded;
scales become one per output, or stay one per block of 128 by 128. AITER then rounds rows of ``x``,
and of what is activated, to the format of the weights with a scale per row or per 128 of a row.
Argument mapping is tested with functions that compute on the processor; on a GPU it was not run.

Dimensions: T tokens, H hidden size, E experts, I intermediate size, K chosen experts, R and C
scales down and across a matrix.

Source: ROCm/aiter, ``aiter/fused_moe.py`` (shapes of scales, what is rounded), ``aiter/ops/
shuffle.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer import Request, Verdict
from interposer_rocm._aiter.experts import mixture, shuffled
from interposer_rocm._aiter.library import confirm_scaled_experts, function
from interposer_rocm._aiter.package import BLOCK, NEEDS_FNUZ
from interposer_rocm._scaled_products import halved


def prepare(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the weights in tiles of 16 by 16, and scales as AITER reads them.

    Raises: ValueError: scales are neither one per matrix or output, nor per block of 128 by 128.
    """
    in_blocks = max(gate_up_scale.shape[-1], down_scale.shape[-1]) > 1
    scales = _of_blocks if in_blocks else _of_outputs
    return {
        "gate_up": shuffled(gate_up),
        "gate_up_scale": scales(gate_up, gate_up_scale),
        "down": shuffled(down),
        "down_scale": scales(down, down_scale),
    }


def prepare_halves(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return what ``prepare`` does of weights as fnuz of half the value, and scales doubled."""
    return prepare(halved(gate_up), gate_up_scale * 2, halved(down), down_scale * 2)


def fused_experts_fp8(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Compute ``fused_experts_fp8`` of prepared weights for the gates that the record names."""
    in_blocks = gate_up_scale.shape[1] != gate_up.shape[1]
    return mixture(
        x,
        gate_up,
        down,
        weights,
        expert_ids,
        quant_type=_kind(in_blocks=in_blocks),
        w1_scale=gate_up_scale,
        w2_scale=down_scale,
    )


def confirm(request: Request) -> Verdict:
    """Say whether AITER takes scales here, and prepare one small expert as all would be.

    What that raises becomes a refusal, so that the next best kernel is taken.
    """
    verdict = confirm_scaled_experts(request)
    if verdict:
        one = torch.zeros((1, 2 * BLOCK, BLOCK), dtype=torch.float8_e4m3fn)
        scales = torch.ones((1, 2, 1))
        fnuz = request.capability.architecture in NEEDS_FNUZ
        (prepare_halves if fnuz else prepare)(one, scales, one[:, :BLOCK], scales[:, :1])
        _kind(in_blocks=request.dims.get("granularity") == "block")
    return verdict


def _kind(*, in_blocks: bool) -> Any:
    """Return AITER's name of how scales are laid out."""
    kinds: Any = function("aiter:QuantType")
    return kinds.per_128x128 if in_blocks else kinds.per_Token


def _of_outputs(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``[E, R, 1]`` repeated to one scale for every output of ``weight``."""
    return scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1).contiguous()


def _of_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``[E, R, C]`` as it is."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape[1:])
    if scale.shape[1:] != (rows, columns):
        found = tuple(scale.shape[1:])
        raise ValueError(
            f"a matrix of {tuple(weight.shape[1:])} has scales of {found}, must be "
            f"{(rows, columns)}: one per block of {BLOCK} by {BLOCK}"
        )
    return scale.contiguous()
