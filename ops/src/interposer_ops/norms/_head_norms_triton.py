# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels that normalise each head or group of a row.

T tokens, N heads, K kv heads, D head size, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import row_tile
from interposer_ops.norms._norms_triton import norm_rows, normalise


@triton_kernel("qk_norm")
def qk_norm_triton(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``qk_norm`` of query and key in one launch."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    y = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_y = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if y.numel() + key_y.numel() == 0:
        return y, key_y
    tile = row_tile("head_norm", query.device, head_size)
    query_blocks = tile.row_blocks(num_tokens * num_heads)
    _norm_heads[(query_blocks + tile.row_blocks(num_tokens * num_kv_heads),)](
        query, key, query_weight, key_weight, y, key_y, num_tokens, query.stride(0), key.stride(0),
        eps, query_blocks,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, SIZE=head_size, **tile.options,
    )  # fmt: skip
    return y, key_y


@triton_kernel("l2_norm")
def l2_norm_triton(x: Tensor, eps: float) -> Tensor:
    """Compute ``l2_norm`` in Triton: scale each row to unit Euclidean length."""
    return normalise("head_norm", "l2", x, None, eps)[0]


@triton_kernel("gated_rms_norm")
def gated_rms_norm_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int,
    norm_before_gate: bool,
) -> Tensor:  # fmt: skip
    """Compute ``gated_rms_norm`` in Triton: RMS norm of each group of a row, gated by SiLU."""
    kind = "norm first" if norm_before_gate else "gate first"
    return normalise("head_norm", kind, x, weight, eps, group_size=group_size, gate=gate)[0]


@triton.jit
def _norm_heads(
    query, key, query_weight, key_weight, y, key_y, num_tokens, query_stride, key_stride, eps,
    query_blocks,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    # One launch for both tensors: the first programs take the heads of the query.
    if block < query_blocks:
        head = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        token = head // NUM_HEADS
        x = query + token * query_stride + (head % NUM_HEADS) * SIZE
        row_mask, target = token < num_tokens, y + head * SIZE
        norm_rows(
            x, None, None, query_weight, None, None, target, None, row_mask, eps, None,
            SIZE, "rms", None, COLUMNS,
        )  # fmt: skip
    else:
        head = (block - query_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        token = head // NUM_KV_HEADS
        x = key + token * key_stride + (head % NUM_KV_HEADS) * SIZE
        row_mask, target = token < num_tokens, key_y + head * SIZE
        norm_rows(
            x, None, None, key_weight, None, None, target, None, row_mask, eps, None,
            SIZE, "rms", None, COLUMNS,
        )  # fmt: skip


def _gated(label: str, width: int, group_size: int, norm_before_gate: bool) -> Build:
    rows, options = (BF16, 64, width), (1e-5, group_size, norm_before_gate)
    return Build("gated_rms_norm_triton", label, given(rows, rows, (BF16, width), *options))


_WEIGHT = (BF16, 128)
BUILDS = (
    Build(
        "qk_norm_triton",
        "32 and 8 heads of 128",
        given((BF16, 64, 32, 128), (BF16, 64, 8, 128), _WEIGHT, _WEIGHT, 1e-6),
    ),
    Build("l2_norm_triton", "16 heads of 128", given((BF16, 64, 16, 128), 1e-6)),
    _gated("groups of 128", 4096, 128, True),
    _gated("one of 8192", 8192, 8192, False),
    _gated("one of 14336", 14336, 14336, False),
)
