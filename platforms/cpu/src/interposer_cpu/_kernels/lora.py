"""Multi-LoRA of the compiled library: every row uses the matrices of its adapter.

Dimensions: T tokens, I inputs, O outputs of the adapters, A adapters, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from interposer_cpu import native
from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import FLOAT32, TYPES, float64_bits

# The same as kLoraRanks, kLoraInputs and kLoraPanel in native/lora/lora.h.
_RANKS, _INPUTS, _PANEL = 4, 32, 64


@fused("lora_shrink")
def lora_shrink(
    x: torch.Tensor, lora_a: torch.Tensor, adapter_ids: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute the op ``lora_shrink``: rows times the A matrix of their adapter."""
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
    """Compute the op ``lora_expand`` with ``lora_b`` ordered by ``prepare_expand``."""
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
    """Reorder the A matrices ``[A, R, I]`` of ``lora_shrink`` for sequential reading.

    Blocks of 4 ranks follow each other. In a block, chunks of 32 inputs follow each other, each
    with the 32 inputs of rank 0, then of rank 1, and so on.
    """
    count, rank, inputs = lora_a.shape
    even = inputs // _INPUTS * _INPUTS
    blocks = []
    for block in lora_a.split(_RANKS, 1):
        chunks = block[..., :even].unflatten(2, (even // _INPUTS, _INPUTS)).transpose(1, 2)
        blocks += [chunks.flatten(1), block[..., even:].flatten(1)]
    return {"lora_a": torch.cat(blocks, 1).view(count, rank, inputs)}


def prepare_expand(lora_b: torch.Tensor) -> dict[str, Any]:
    """Transpose and reorder the B matrices of ``lora_expand``, ``[A, O, R]`` to ``[A, R, O]``.

    So a call reads sequentially: panels of 64 outputs follow each other, and in a panel all ranks.
    In bfloat16, two ranks are interleaved element by element, as dot-product instructions expect.
    """
    count, outputs, rank = lora_b.shape
    # The outputs after the last full panel form one narrower panel.
    even = outputs // _PANEL * _PANEL
    panels = lora_b[:, :even].unflatten(1, (even // _PANEL, _PANEL)), lora_b[:, None, even:]
    ordered = torch.cat([_order_ranks(panel).flatten(1) for panel in panels], 1)
    return {"lora_b": ordered.view(count, rank, outputs)}


def _order_ranks(panels: torch.Tensor) -> torch.Tensor:
    """Reorder panels ``[A, panels, outputs, R]`` to ``[A, panels, R * outputs]``."""
    # An odd last rank of bfloat16 stays unpaired.
    paired = panels.shape[3] // 2 * 2 if panels.dtype is torch.bfloat16 else 0
    pairs = panels[..., :paired].unflatten(3, (paired // 2, 2)).transpose(2, 3)
    return torch.cat((pairs.flatten(2), panels[..., paired:].transpose(2, 3).flatten(2)), 2)
