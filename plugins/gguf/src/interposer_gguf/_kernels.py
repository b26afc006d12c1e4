"""CPU kernels in torch that dequantize and multiply as many rows at a time as fit the cache.

Shapes: T tokens, I input features, O output features, R rows of a step, G groups of inputs that
    share
a scale, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_gguf._block_formats import BlockFormat, format_named
from interposer_ops.quantizers import unpack_nibbles

STEP_NUMEL = 1 << 19
"""Weights per step: 2 MiB in float32. Smaller steps need more calls, larger ones miss the cache."""

# The zero point of four-bit weights that state none.
_DEFAULT_ZERO_POINT = 8

Rows = Callable[[slice], torch.Tensor]
Halves = tuple[torch.Tensor, torch.Tensor]


def pack_halves(weight: torch.Tensor, bias: torch.Tensor | None, stored_as: str) -> dict[str, Any]:
    """Repack a 4-bit weight as two tensors; the total size stays the same.

    Byte i of a row of the first tensor, ``[O, I / 2]``, packs inputs i and i + I / 2, so that
    unpacking yields two contiguous halves. The second, ``[O, B, bytes]``, has the scales of each
    block. Weights of other formats are returned unchanged.
    """
    layout = format_named(stored_as)
    in_features = layout.row_numbers(weight.shape[1])
    # Only formats of unsigned nibbles (q4_1, q4_k), and only if no group spans both halves.
    if (layout.lowest, layout.highest) == (0, 15) and in_features % (2 * layout.group_size) == 0:
        low, high = layout.quantized(weight).view(torch.uint8).chunk(2, -1)
        blocks = weight.unflatten(-1, (in_features // layout.size, layout.num_bytes))
        block_headers = blocks[..., : layout.num_bytes - layout.size // 2].contiguous()
        return {"weight": (low | high << 4, block_headers), "bias": bias, "stored_as": stored_as}
    return {"weight": weight, "bias": bias, "stored_as": stored_as}


def gguf_linear(
    x: torch.Tensor, weight: torch.Tensor | Halves, bias: torch.Tensor | None, stored_as: str
) -> torch.Tensor:
    """Compute the op ``gguf_linear`` ``[..., O]``, dequantizing some rows at a time."""
    layout = format_named(stored_as)
    if isinstance(weight, tuple):
        return _linear_by_halves(x, *weight, bias, layout)

    def rows(row_slice: slice) -> torch.Tensor:
        return layout.dequantized(weight[row_slice], torch.float32)

    return matmul_by_rows(x, weight.shape[0], rows, bias)


def w8a16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``w8a16_linear`` ``[..., O]`` with several groups, dequantizing rows in chunks."""

    def rows(row_slice: slice) -> torch.Tensor:
        grouped = weight[row_slice].float().unflatten(1, (scale.shape[1], -1))
        if zero_points is not None:
            grouped -= zero_points[row_slice].float().unsqueeze(-1)
        return _scaled(grouped, scale[row_slice])

    return matmul_by_rows(x, weight.shape[0], rows, bias)


def w4a16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the op ``w4a16_linear`` ``[..., O]``, dequantizing some rows at a time."""

    def rows(row_slice: slice) -> torch.Tensor:
        grouped = unpack_nibbles(weight[row_slice]).float().unflatten(1, (scale.shape[1], -1))
        if zero_points is None:
            grouped -= _DEFAULT_ZERO_POINT
        else:
            grouped -= zero_points[row_slice].float().unsqueeze(-1)
        return _scaled(grouped, scale[row_slice])

    return matmul_by_rows(x, weight.shape[0], rows, bias)


def _linear_by_halves(
    x: torch.Tensor,
    packed_weight: torch.Tensor,
    block_headers: torch.Tensor,
    bias: torch.Tensor | None,
    layout: BlockFormat,
) -> torch.Tensor:
    """Multiply ``x`` by a 4-bit weight that ``pack_halves`` repacked.

    All inputs of a group share one offset, so the offset is multiplied by the sum of inputs.
    """
    out_features, width = packed_weight.shape
    columns = x.reshape(-1, 2 * width).float().T
    first, last = columns.split(width)
    sums = columns.unflatten(0, (-1, layout.group_size)).sum(1)
    result = torch.empty(out_features, columns.shape[1], dtype=torch.float32, device=x.device)
    step = max(1, STEP_NUMEL // width)
    for start in range(0, out_features, step):
        row_slice = slice(start, min(start + step, out_features))
        scale, offset = layout.block_scales(block_headers[row_slice], torch.float32)
        first_scale, last_scale = scale.flatten(1).chunk(2, 1)
        packed_rows, result_rows = (
            packed_weight[row_slice].unflatten(1, (-1, layout.group_size)),
            result[row_slice],
        )
        torch.mm(_scaled((packed_rows & 15).float(), first_scale), first, out=result_rows)
        result_rows.addmm_(_scaled((packed_rows >> 4).float(), last_scale), last)
        if offset is not None:
            result_rows.addmm_(offset.flatten(1), sums)
    return _transposed(result, x, bias)


def _scaled(grouped: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply groups ``[R, G, I / G]`` by their scales in place; return a view ``[R, I]``."""
    result: torch.Tensor = grouped.mul_(scale.float().unsqueeze(-1)).flatten(1)
    return result


def matmul_by_rows(
    x: torch.Tensor, out_features: int, rows: Rows, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply ``x`` by the transpose of a weight, dequantizing slices of rows by ``rows``."""
    in_features = x.shape[-1]
    # Outputs are computed as [O, T], because each step then writes contiguous rows.
    columns = x.reshape(-1, in_features).float().T
    result = torch.empty(out_features, columns.shape[1], dtype=torch.float32, device=x.device)
    step = max(1, STEP_NUMEL // in_features)
    for start in range(0, out_features, step):
        row_slice = slice(start, min(start + step, out_features))
        torch.mm(rows(row_slice), columns, out=result[row_slice])
    return _transposed(result, x, bias)


def _transposed(result: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add the bias to ``result`` ``[O, T]``, transpose to ``[..., O]``, convert to x's dtype."""
    if bias is not None:
        result += bias.float().unsqueeze(-1)
    outputs = result.T.to(x.dtype, memory_format=torch.contiguous_format)
    return outputs.contiguous().view(*x.shape[:-1], len(result))
