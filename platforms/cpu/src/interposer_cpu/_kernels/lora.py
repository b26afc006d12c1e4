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

_PANEL = 64  # outputs, as kLoraPanel


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
    """Return the constants of ``lora_shrink``, without gaps."""
    return {"lora_a": lora_a.contiguous()}


def prepare_expand(lora_b: torch.Tensor) -> dict[str, Any]:
    """Return the constants of ``lora_expand``, ``[A, R, O]`` that lie as ``[A, panels, R, 64]``.

    All ranks of a panel of outputs stand behind each other, so that a call reads from front to end.
    """
    count, outputs, rank = lora_b.shape
    panels = [panel.transpose(1, 2).flatten(1) for panel in lora_b.split(_PANEL, 1)]
    whole = torch.cat(panels, 1) if panels else lora_b.new_empty(count, 0)
    return {"lora_b": whole.view(count, rank, outputs)}
