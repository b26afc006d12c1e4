# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernel that rotates query and key in one launch.

T tokens, N heads, K kv heads, D head size, R rotated size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP32, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import row_tile


@triton_kernel("rotary_embedding")
def rotary_embedding_triton(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``rotary_embedding`` in Triton: rotate halves (NeoX) of query and key."""
    return _launch_rotate(query, key, cos, sin)


@triton_kernel("rotary_embedding_interleaved")
def rotary_embedding_interleaved_triton(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``rotary_embedding_interleaved`` in Triton: rotate adjacent pairs (GPT-J)."""
    return _launch_rotate(query, key, cos, sin, pairs=True)


def _launch_rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor,
    pairs: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate query and key: halves, or adjacent pairs if ``pairs``."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, half = key.shape[1], cos.shape[-1]
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotated_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if num_tokens == 0:
        return rotated, rotated_key
    tile = row_tile("rotary", query.device, head_size)
    query_blocks = tile.row_blocks(num_tokens * num_heads)
    _rotate[(query_blocks + tile.row_blocks(num_tokens * num_kv_heads),)](
        query, key, cos, sin, rotated, rotated_key, num_tokens, query.stride(0), key.stride(0),
        cos.stride(0), sin.stride(0), query_blocks,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, HEAD_SIZE=head_size, PAIRS=pairs,
        ROWS=tile.rows, **tile.compiled,
    )  # fmt: skip
    return rotated, rotated_key


@triton.jit
def _rotate(
    query, key, cos, sin, rotated, rotated_key, num_tokens, query_stride, key_stride, cos_stride,
    sin_stride, query_blocks,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    HEAD_SIZE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    # One launch for both tensors: the first programs take the heads of the query.
    if block < query_blocks:
        _rotate_heads(
            query, rotated, cos, sin, block, num_tokens, query_stride, cos_stride, sin_stride,
            NUM_HEADS, HALF, HEAD_SIZE, PAIRS, ROWS,
        )  # fmt: skip
    else:
        _rotate_heads(
            key, rotated_key, cos, sin, block - query_blocks, num_tokens, key_stride, cos_stride,
            sin_stride, NUM_KV_HEADS, HALF, HEAD_SIZE, PAIRS, ROWS,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    source, target, cos, sin, block, num_tokens, stride, cos_stride, sin_stride,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_SIZE: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // NUM_HEADS
    token_mask = token < num_tokens
    source += token * stride + (row % NUM_HEADS) * HEAD_SIZE
    target += row * HEAD_SIZE
    cos += token * cos_stride
    sin += token * sin_stride
    dtype: tl.constexpr = target.dtype.element_ty
    if HALF > 0:
        angle = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        inside = token_mask & (angle < HALF)
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        if PAIRS:
            first = 2 * angle
            second = first + 1
        else:
            first = angle
            second = HALF + angle
        a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + first, (a * c - b * s).to(dtype), mask=inside)
        tl.store(target + second, (b * c + a * s).to(dtype), mask=inside)
    # The rest of a head is copied: the result is a new tensor.
    if 2 * HALF < HEAD_SIZE:
        position = 2 * HALF + tl.arange(0, triton.next_power_of_2(HEAD_SIZE - 2 * HALF))[None, :]
        inside = token_mask & (position < HEAD_SIZE)
        tl.store(target + position, tl.load(source + position, mask=inside), mask=inside)


_HEADS = (BF16, 64, 32, 128), (BF16, 64, 8, 128)
_ANGLES = FP32, 64, 64
BUILDS = tuple(
    Build(f"{op}_triton", "32 and 8 heads of 128", given(*_HEADS, _ANGLES, _ANGLES))
    for op in ("rotary_embedding", "rotary_embedding_interleaved")
)
