"""QK norms and rotary embeddings of the compiled library.

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

# Bits of the library's op: has a norm weight, rotates, rotates neighbouring pairs (interleaved).
_WEIGHTED, _TURNED, _NEIGHBOURS = 1, 8, 16

Pair = tuple[torch.Tensor, torch.Tensor]


@fused("rotary_embedding")
def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Pair:
    """Compute the op ``rotary_embedding``: rotate halves (NeoX) of query and key."""
    if cos.dtype is not FLOAT32:  # the library reads float32 tables only
        return rotary_embedding_op.reference(query, key, cos, sin)
    return _rotate(query, key, cos, sin, 0)


@fused("rotary_embedding_interleaved")
def rotary_embedding_interleaved(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Pair:
    """Compute the op ``rotary_embedding_interleaved``: rotate adjacent pairs (GPT-J)."""
    if cos.dtype is not FLOAT32:
        return interleaved_op.reference(query, key, cos, sin)
    return _rotate(query, key, cos, sin, _NEIGHBOURS)


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, order: int
) -> Pair:
    """Rotate query and key; ``order`` is ``_NEIGHBOURS`` (interleaved) or 0 (halves)."""
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    if is_compiling():  # x stands for the absent norm weight
        both = [_heads_traced(x, x, cos, sin, _TURNED | order, 0.0) for x in (query, key)]
        return both[0], both[1]
    tables = cos.data_ptr(), sin.data_ptr()
    turn = cos.shape[1], order
    return _normalize_and_rotate(query, 0, tables, turn, 0.0), _normalize_and_rotate(
        key, 0, tables, turn, 0.0
    )


def qk_norm(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
) -> Pair:
    """Compute the op ``qk_norm``: RMS norm of every query and key head."""
    # The op needs a tensor for every argument: x stands for the absent tables.
    if is_compiling():
        weighted = ((query, query_weight), (key, key_weight))
        both = [_heads_traced(x, weight, x, x, _WEIGHTED, eps) for x, weight in weighted]
        return both[0], both[1]
    return (
        _normalize_and_rotate(query, query_weight.data_ptr(), (0, 0), (0, 0), eps),
        _normalize_and_rotate(key, key_weight.data_ptr(), (0, 0), (0, 0), eps),
    )


def prepare_qk_norm(query_weight: torch.Tensor, key_weight: torch.Tensor) -> dict[str, Any]:
    """Make the weights of ``qk_norm`` contiguous."""
    return {"query_weight": query_weight.contiguous(), "key_weight": key_weight.contiguous()}


def _normalize_and_rotate(
    x: torch.Tensor, weight: int, tables: tuple[int, int], turn: tuple[int, int], eps: float
) -> torch.Tensor:
    """Normalize and rotate the heads of ``x`` ``[T, N, D]``.

    Args:
        weight: address of ``[D]``, 0 for no norm.
        tables: addresses of cosines and sines, 0 for no rotation.
        turn: half of the rotated size, and ``_NEIGHBOURS`` or 0.
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


def _heads_traced(
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
