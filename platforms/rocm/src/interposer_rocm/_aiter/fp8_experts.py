"""The op ``fused_experts_fp8`` (MoE with FP8 weights) by AITER, which also quantizes activations.

After loading, weights are shuffled into tiles and, on gfx942, converted to the fnuz format of the
hardware; scales are expanded to one per output, or stay one per block of 128 by 128. AITER
quantizes ``x`` and the activated intermediate rows to the format of the weights, with one scale per
row or per 128 elements of a row. Argument mapping is tested with functions that compute on the CPU;
no GPU has run this module.

Dimensions: T tokens, H hidden size, E experts, I intermediate size, K chosen experts, R and C
scales down and across a matrix.

Source: ROCm/aiter, ``aiter/fused_moe.py`` (shapes of scales, quantized tensors), ``aiter/ops/
shuffle.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer import Request, Verdict
from interposer_rocm._aiter.experts import run_fused_moe, shuffle_weight
from interposer_rocm._aiter.library import confirm_scaled_experts, function
from interposer_rocm._aiter.package import BLOCK, NEEDS_FNUZ
from interposer_rocm._scaled_gemm import halved


def prepare(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Shuffle the weights into tiles of 16 by 16, and lay out the scales for AITER.

    Raises: ValueError: scales are neither one per matrix or output, nor per block of 128 by 128.
    """
    in_blocks = max(gate_up_scale.shape[-1], down_scale.shape[-1]) > 1
    scales = _checked_block_scales if in_blocks else _scales_per_output
    return {
        "gate_up": shuffle_weight(gate_up),
        "gate_up_scale": scales(gate_up, gate_up_scale),
        "down": shuffle_weight(down),
        "down_scale": scales(down, down_scale),
    }


def prepare_halves(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Halve the weights as fnuz, double the scales, and prepare weights and scales for AITER."""
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
    """Compute the op ``fused_experts_fp8`` gated by silu with prepared weights."""
    # ``prepare`` leaves either one scale per output, or one per block of outputs.
    in_blocks = gate_up_scale.shape[1] != gate_up.shape[1]
    return run_fused_moe(
        x,
        gate_up,
        down,
        weights,
        expert_ids,
        quant_type=_quant_type(in_blocks=in_blocks),
        w1_scale=gate_up_scale,
        w2_scale=down_scale,
    )


def confirm(request: Request) -> Verdict:
    """Check that AITER takes scales, by preparing one small expert.

    The caller turns an exception into a refusal, so the next best kernel is selected.
    """
    verdict = confirm_scaled_experts(request)
    if verdict:
        # The smallest expert with whole blocks: H = I = BLOCK.
        weights = torch.zeros((1, 2 * BLOCK, BLOCK), dtype=torch.float8_e4m3fn)
        scales = torch.ones((1, 2, 1))
        fnuz = request.capability.architecture in NEEDS_FNUZ
        (prepare_halves if fnuz else prepare)(weights, scales, weights[:, :BLOCK], scales[:, :1])
        _quant_type(in_blocks=request.dims.get("granularity") == "block")
    return verdict


def _quant_type(*, in_blocks: bool) -> Any:
    """Return AITER's ``QuantType`` for the layout of the scales."""
    quant_types: Any = function("aiter:QuantType")
    return quant_types.per_128x128 if in_blocks else quant_types.per_Token


def _scales_per_output(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Repeat the scales ``[E, R, 1]`` to one per output of ``weight``."""
    return scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1).contiguous()


def _checked_block_scales(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the block scales ``[E, R, C]`` contiguous; raise ValueError for another shape."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape[1:])
    if scale.shape[1:] != (rows, columns):
        scale_shape = tuple(scale.shape[1:])
        raise ValueError(
            f"a matrix of {tuple(weight.shape[1:])} has scales of {scale_shape}, must be "
            f"{(rows, columns)}: one per block of {BLOCK} by {BLOCK}"
        )
    return scale.contiguous()
