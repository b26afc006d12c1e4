"""CPU kernels that dequantize a weight by some rows, small enough for the cache.

Dimensions: T tokens, I input features, O output features, R rows of a step, G groups of
inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_gguf._block_formats import BlockFormat, format_named
from interposer_ops.quantizers import unpack_nibbles

STEP = 1 << 19
"""Numbers of a step: 2 MiB in float32. Less costs more in calls, more leaves the cache."""

_MIDDLE = 8

Rows = Callable[[slice], torch.Tensor]
Halves = tuple[torch.Tensor, torch.Tensor]


def in_halves(weight: torch.Tensor, bias: torch.Tensor | None, stored_as: str) -> dict[str, Any]:
    """Return the constants with a weight of four-bit codes in two parts, no larger than it was.

    Byte i of a row of the first part, ``[O, I / 2]``, holds the codes of the inputs i and
    i + I / 2, so that long rows are taken apart at once; the second, ``[O, B, bytes]``, is what
    stands before the codes in each of the B blocks. Other weights stay as they are.
    """
    layout = format_named(stored_as)
    in_features = layout.row_numbers(weight.shape[1])
    if (layout.lowest, layout.highest) == (0, 15) and in_features % (2 * layout.group_size) == 0:
        low, high = layout.codes(weight).view(torch.uint8).chunk(2, -1)
        blocks = weight.unflatten(-1, (in_features // layout.size, layout.num_bytes))
        heads = blocks[..., : layout.num_bytes - layout.size // 2].contiguous()
        return {"weight": (low | high << 4, heads), "bias": bias, "stored_as": stored_as}
    return {"weight": weight, "bias": bias, "stored_as": stored_as}


def gguf_linear(
    x: torch.Tensor, weight: torch.Tensor | Halves, bias: torch.Tensor | None, stored_as: str
) -> torch.Tensor:
    """Return the op ``gguf_linear``, ``[..., O]``."""
    layout = format_named(stored_as)
    if isinstance(weight, tuple):
        return _by_halves(x, *weight, bias, layout)

    def rows(place: slice) -> torch.Tensor:
        return layout.dequantized(weight[place], torch.float32)

    return product_by_rows(x, weight.shape[0], rows, bias)


def w8a16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the op ``w8a16_linear``, ``[..., O]``, of several groups."""

    def rows(place: slice) -> torch.Tensor:
        grouped = weight[place].float().unflatten(1, (scale.shape[1], -1))
        if zero_points is not None:
            grouped -= zero_points[place].float().unsqueeze(-1)
        return _scaled(grouped, scale[place])

    return product_by_rows(x, weight.shape[0], rows, bias)


def w4a16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the op ``w4a16_linear``, ``[..., O]``."""

    def rows(place: slice) -> torch.Tensor:
        grouped = unpack_nibbles(weight[place]).float().unflatten(1, (scale.shape[1], -1))
        if zero_points is None:
            grouped -= _MIDDLE
        else:
            grouped -= zero_points[place].float().unsqueeze(-1)
        return _scaled(grouped, scale[place])

    return product_by_rows(x, weight.shape[0], rows, bias)


def _by_halves(
    x: torch.Tensor,
    codes: torch.Tensor,
    heads: torch.Tensor,
    bias: torch.Tensor | None,
    layout: BlockFormat,
) -> torch.Tensor:
    """Return the product with what ``in_halves`` made of a weight.

    All inputs of a group have one offset, so it is multiplied by their sum.
    """
    out_features, width = codes.shape
    columns = x.reshape(-1, 2 * width).float().T
    first, last = columns.split(width)
    sums = columns.unflatten(0, (-1, layout.group_size)).sum(1)
    result = torch.empty(out_features, columns.shape[1], dtype=torch.float32, device=x.device)
    step = max(1, STEP // width)
    for start in range(0, out_features, step):
        place = slice(start, min(start + step, out_features))
        scale, offset = layout.block_scales(heads[place], torch.float32)
        before, behind = scale.flatten(1).chunk(2, 1)
        packed, rows = codes[place].unflatten(1, (-1, layout.group_size)), result[place]
        torch.mm(_scaled((packed & 15).float(), before), first, out=rows)
        rows.addmm_(_scaled((packed >> 4).float(), behind), last)
        if offset is not None:
            rows.addmm_(offset.flatten(1), sums)
    return _turned(result, x, bias)


def _scaled(grouped: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``[R, I]``: the codes ``[R, G, I / G]``, which are written to, times their scales."""
    result: torch.Tensor = grouped.mul_(scale.float().unsqueeze(-1)).flatten(1)
    return result


def product_by_rows(
    x: torch.Tensor, out_features: int, rows: Rows, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``x`` times the transpose of what ``rows`` returns, in the dtype of ``x``."""
    in_features = x.shape[-1]
    columns = x.reshape(-1, in_features).float().T
    result = torch.empty(out_features, columns.shape[1], dtype=torch.float32, device=x.device)
    step = max(1, STEP // in_features)
    for start in range(0, out_features, step):
        place = slice(start, min(start + step, out_features))
        torch.mm(rows(place), columns, out=result[place])
    return _turned(result, x, bias)


def _turned(result: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``result`` ``[O, T]`` and the bias as ``[..., O]``, dtype and rows of ``x``."""
    if bias is not None:
        result += bias.float().unsqueeze(-1)
    turned = result.T.to(x.dtype, memory_format=torch.contiguous_format)
    return turned.contiguous().view(*x.shape[:-1], len(result))
