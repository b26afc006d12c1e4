"""Low-rank adapters by the compiled library, each row by the matrices of its own.

Dimensions: T tokens, I inputs, O outputs of the adapters, A adapters, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from interposer_cpu import native
from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import FLOAT32, TYPES, float64_bits

# As kLoraRanks, kLoraInputs and kLoraPanel.
_RANKS, _INPUTS, _PANEL = 4, 32, 64


@fused("lora_shrink")
def lora_shrink(
    x: torch.Tensor, lora_a: torch.Tensor, adapter_ids: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the op ``lora_shrink``."""
    count, rank, inputs = x.shape[0], lora_a.shape[1], lora_a.shape[2]
    out = torch.empty(count, rank, dtype=FLOAT32)
    if is_compiling():
        torch.ops.interposer_cpu.lora_shrink_out(out, x, lora_a, adapter_ids, scale)
    elif out.numel():
        native.library().lora_shrink(
            x.data_ptr(),
            lora_a.data_ptr(),
            adapter_ids.data_ptr(),
            out.data_ptr(),
            TYPES[x.dtype],
            count,
            rank,
            inputs,
            x.stride(0),
            float64_bits(scale),
        )
    return out


@fused("lora_expand")
def lora_expand(
    shrunk: torch.Tensor,
    lora_b: torch.Tensor,
    adapter_ids: torch.Tensor,
    y: torch.Tensor,
    offset: int,
) -> None:
    """Compute the op ``lora_expand`` for ``lora_b`` of ``prepare_expand``."""
    rank, outputs = lora_b.shape[1:]
    columns = y[:, offset : offset + outputs]
    if is_compiling():
        torch.ops.interposer_cpu.lora_expand_out(columns, shrunk, lora_b, adapter_ids)
    elif columns.numel():
        native.library().lora_expand(
            shrunk.data_ptr(),
            lora_b.data_ptr(),
            adapter_ids.data_ptr(),
            columns.data_ptr(),
            TYPES[y.dtype],
            y.shape[0],
            rank,
            outputs,
            shrunk.stride(0),
            y.stride(0),
        )


def prepare_shrink(lora_a: torch.Tensor) -> dict[str, Any]:
    """Return the constants of ``lora_shrink``, ``[A, R, I]`` in the order of a call's reads.

    Blocks of 4 ranks stand behind each other, and in a block 32 inputs of each rank.
    """
    count, rank, inputs = lora_a.shape
    even = inputs // _INPUTS * _INPUTS
    blocks = []
    for block in lora_a.split(_RANKS, 1):
        chunks = block[..., :even].unflatten(2, (even // _INPUTS, _INPUTS)).transpose(1, 2)
        blocks += [chunks.flatten(1), block[..., even:].flatten(1)]
    return {"lora_a": torch.cat(blocks, 1).view(count, rank, inputs)}


def prepare_expand(lora_b: torch.Tensor) -> dict[str, Any]:
    """Return the constants of ``lora_expand``, ``[A, R, O]`` in the order of a call's reads.

    All ranks of a panel of 64 outputs stand behind each other; of bfloat16 pairs of ranks, whose
    numbers take turns.
    """
    count, outputs, rank = lora_b.shape
    even = outputs // _PANEL * _PANEL
    panels = lora_b[:, :even].unflatten(1, (even // _PANEL, _PANEL)), lora_b[:, None, even:]
    whole = torch.cat([_ranks_in_turn(panel).flatten(1) for panel in panels], 1)
    return {"lora_b": whole.view(count, rank, outputs)}


def _ranks_in_turn(panels: torch.Tensor) -> torch.Tensor:
    """Return ``[A, panels, R * outputs]`` of ``[A, panels, outputs, R]``."""
    paired = panels.shape[3] // 2 * 2 if panels.dtype is torch.bfloat16 else 0
    pairs = panels[..., :paired].unflatten(3, (paired // 2, 2)).transpose(2, 3)
    return torch.cat((pairs.flatten(2), panels[..., paired:].transpose(2, 3).flatten(2)), 2)
