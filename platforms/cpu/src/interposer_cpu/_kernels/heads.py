"""Norms and rotations of heads by the compiled library.

Dimensions: T tokens, N heads, K kv heads, D head size, R rotated size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import FLOAT32, TYPES
from interposer_cpu.native import library
from interposer_ops.rotary import rotary_embedding as rotary_embedding_op
from interposer_ops.rotary import rotary_embedding_interleaved as interleaved_op

_WEIGHTED, _TURNED, _NEIGHBOURS = 1, 8, 16

Pair = tuple[torch.Tensor, torch.Tensor]


@fused("rotary_embedding")
def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Pair:
    """Return the op ``rotary_embedding``."""
    if cos.dtype is not FLOAT32:
        return rotary_embedding_op.reference(query, key, cos, sin)
    return _rotated(query, key, cos, sin, 0)


def rotary_embedding_interleaved(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Pair:
    """Return the op ``rotary_embedding_interleaved``."""
    if cos.dtype is not FLOAT32:
        return interleaved_op.reference(query, key, cos, sin)
    return _rotated(query, key, cos, sin, _NEIGHBOURS)


def _rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, order: int
) -> Pair:
    """Return both rotated; ``order`` is ``_NEIGHBOURS`` or 0 for halves."""
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    if is_compiling():
        both = [_turned(x, x, cos, sin, _TURNED | order, 0.0) for x in (query, key)]
        return both[0], both[1]
    tables = cos.data_ptr(), sin.data_ptr()
    turn = cos.shape[1], order
    return _heads(query, 0, tables, turn, 0.0), _heads(key, 0, tables, turn, 0.0)


def qk_norm(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
) -> Pair:
    """Return the op ``qk_norm``."""
    if is_compiling():
        weighted = ((query, query_weight), (key, key_weight))
        both = [_turned(x, weight, x, x, _WEIGHTED, eps) for x, weight in weighted]
        return both[0], both[1]
    return (
        _heads(query, query_weight.data_ptr(), (0, 0), (0, 0), eps),
        _heads(key, key_weight.data_ptr(), (0, 0), (0, 0), eps),
    )


def prepare_qk_norm(query_weight: torch.Tensor, key_weight: torch.Tensor) -> dict[str, Any]:
    """Return the constants of ``qk_norm`` without gaps."""
    return {"query_weight": query_weight.contiguous(), "key_weight": key_weight.contiguous()}


def _heads(
    x: torch.Tensor, weight: int, tables: tuple[int, int], turn: tuple[int, int], eps: float
) -> torch.Tensor:
    """Return ``x`` ``[T, N, D]`` normalised and rotated.

    Args:
        weight: address of ``[D]``, 0 for no norm.
        tables: addresses of cosines and sines, 0 for no rotation.
        turn: half of the rotated size, and whether neighbours are rotated.
    """
    count, heads, size = x.shape
    steps = x.stride()
    if steps[2] != 1:
        x = x.contiguous()
        steps = x.stride()
    out = torch.empty(count, heads, size, dtype=x.dtype)
    library().turn_heads(
        x.data_ptr(),
        weight,
        *tables,
        out.data_ptr(),
        TYPES[x.dtype],
        count,
        heads,
        size,
        steps[0],
        steps[1],
        *turn,
        eps,
    )
    return out


def _turned(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    parts: int,
    eps: float,
) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops.interposer_cpu.turn_heads_out(out, x, weight, cos, sin, parts, eps)
    return out
