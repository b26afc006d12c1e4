"""Embedding lookups in packed weights, which a tied lm_head shares.

Dimensions: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer import Request, Verdict
from interposer_cpu import native
from interposer_cpu._kernels.interface import TYPES
from interposer_cpu._kernels.linear import (
    judge_compact,
    pack,
    pack_compact,
    pack_w4a16,
    pack_w8a16,
)
from interposer_cpu._kernels.packed_copies import Packed

PackedEmbedding = tuple[Packed, int, torch.dtype]
"""Packed weight, H, and the dtype of the rows of an unquantized weight."""


def embedding(token_ids: torch.Tensor, weight: PackedEmbedding) -> torch.Tensor:
    """Compute the op ``embedding`` with a ``weight`` packed by ``pack_embedding``."""
    return _rows(token_ids, weight, weight[2])


def w4a16_embedding(
    token_ids: torch.Tensor,
    weight: PackedEmbedding,
    scale: None,
    zero_points: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``w4a16_embedding`` with a ``weight`` packed by ``pack_w4a16_embedding``."""
    return _rows(token_ids, weight, out_dtype)


def w8a16_embedding(
    token_ids: torch.Tensor,
    weight: PackedEmbedding,
    scale: None,
    zero_points: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``w8a16_embedding`` with a ``weight`` packed by ``pack_w8a16_embedding``."""
    return _rows(token_ids, weight, out_dtype)


def pack_embedding(weight: torch.Tensor) -> dict[str, Any]:
    """Pack the ``weight`` ``[V, H]`` of ``embedding`` in the format of ``linear``."""
    return {"weight": (pack(weight, None)["weight"], weight.shape[1], weight.dtype)}


def pack_compact_embedding(weight: torch.Tensor) -> dict[str, Any]:
    """Pack the bfloat16 ``weight`` ``[V, H]`` in the format of the kernel ``linear_compact``."""
    return {"weight": (pack_compact(weight, None)["weight"], weight.shape[1], weight.dtype)}


def pack_w4a16_embedding(
    weight: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor | None
) -> dict[str, Any]:
    """Pack weight and scales of ``w4a16_embedding`` into one tensor."""
    packed = pack_w4a16(weight, scale, None, zero_points)["weight"]
    return _constants(packed, 2 * weight.shape[1])  # a byte has two values


def pack_w8a16_embedding(
    weight: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor | None
) -> dict[str, Any]:
    """Pack weight and scales of ``w8a16_embedding`` into one tensor."""
    return _constants(pack_w8a16(weight, scale, None, zero_points)["weight"], weight.shape[1])


def judge_tied(request: Request) -> Verdict:
    """Accept only tables tied to an lm_head: else lookups in unpacked tables are faster."""
    if not request.dims["tied"]:
        return Verdict.refuse("packs weights that are tied to an lm_head, this one is not")
    return native.judge(request)


def judge_tied_compact(request: Request) -> Verdict:
    """Accept bfloat16 tables that are tied to an lm_head, where compact weights pay."""
    verdict = judge_tied(request)
    return judge_compact(request) if verdict else verdict


def _constants(packed: Packed, width: int) -> dict[str, Any]:
    return {"weight": (packed, width, torch.float32), "scale": None, "zero_points": None}


def _rows(token_ids: torch.Tensor, weight: PackedEmbedding, dtype: torch.dtype) -> torch.Tensor:
    # A row number out of range is refused by the library.
    (packed, _), width, _ = weight
    ids = token_ids.contiguous()
    count = ids.shape[0]
    out = torch.empty(count, width, dtype=dtype)
    if torch.compiler.is_compiling():
        torch.ops.interposer_cpu.lookup_out(out, ids, packed)
    else:
        native.library().rows(
            packed.data_ptr(), ids.data_ptr(), count, out.data_ptr(), TYPES[dtype]
        )
    return out
