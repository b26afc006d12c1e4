# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Permutation of tokens into the order of their experts, and back, in Triton.

Dimensions: T tokens, K chosen experts, E experts, H hidden size, C blocks. Slot t K + k is the k-th
choice of token t; slots of expert -1 are skipped.

The sort needs neither atomics nor host synchronization: one program per expert counts its slots,
then one program per expert scans all slots again and writes its own slots in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP32, INT32, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for
from interposer_ops._triton.rows import as_rows, row_tile


def aligned_blocks(expert_ids: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Sort the slots by expert into blocks of ``block_size``; each block belongs to one expert.

    The slots of an expert keep their order and start at the beginning of a block; the expert's last
    block is padded. An expert without slots has no block. The shapes bound the number of blocks: at
    most min(T K, E) experts have slots, and each wastes at most block_size - 1 entries, so C =
    floor((T K + min(T K, E) (block_size - 1)) / block_size).

    Args:
        expert_ids: ``[T, K]`` int32 or int64, from -1 to E - 1; rows may be strided.
    Returns: ``(slots, block_experts)``, both int32: ``[C * block_size]``, T K for padding; ``[C]``,
        -1 for unused blocks.
    """
    num_slots, device = expert_ids.numel(), expert_ids.device
    num_blocks = (num_slots + min(num_slots, num_experts) * (block_size - 1)) // block_size
    slots = torch.empty(num_blocks * block_size, dtype=torch.int32, device=device)
    block_experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    if num_slots == 0:
        return slots, block_experts
    num_padded = torch.empty(1, dtype=torch.int32, device=device)
    _sort(expert_ids, num_experts, block_size, slots, num_padded, block_experts=block_experts)
    return slots, block_experts


@triton_kernel("moe_permute")
def moe_permute_triton(
    x: Tensor, expert_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``moe_permute``, with blocks of one slot, so that there is no padding."""
    (_, top_k), device = expert_ids.shape, x.device
    num_slots, width = expert_ids.numel(), x.shape[1]
    rows = torch.empty((num_slots, width), dtype=x.dtype, device=device)
    positions = torch.empty(expert_ids.shape, dtype=torch.int32, device=device)
    if num_slots == 0:
        return rows, positions, torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    slots = torch.empty(num_slots, dtype=torch.int32, device=device)
    end = starts[num_experts:]
    _sort(expert_ids, num_experts, 1, slots, end, positions=positions, starts=starts)
    if width:
        source = as_rows(x)
        tile = row_tile("moe_permute", device, width)
        _copy_rows[(tile.row_blocks(num_slots), tile.column_blocks(width))](
            source, slots, rows, num_slots, source.stride(0),
            WIDTH=width, TOP_K=top_k, **tile.options,
        )  # fmt: skip
    return rows, positions, starts


@triton_kernel("moe_unpermute")
def moe_unpermute_triton(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Compute ``moe_unpermute`` in Triton: weighted sum of each token's expert results."""
    source = as_rows(rows)
    y = torch.empty((positions.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    _add_up(source, positions, weights, y, (0, source.stride(0)), gathered=True)
    return y


def sum_of_slots(rows: Tensor, expert_ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the expert results of each token, weighted by the routing weights.

    Args:
        rows: ``[T K, H]``, contiguous; rows of skipped slots are not read.
        expert_ids: ``[T, K]``, negative for skipped slots; rows may be strided.
        weights: ``[T, K]``; rows may be strided.
    Returns: ``[T, H]`` of ``dtype``.
    """
    num_tokens, top_k = expert_ids.shape
    width = rows.shape[1]
    y = torch.empty((num_tokens, width), dtype=dtype, device=rows.device)
    _add_up(rows, expert_ids, weights, y, (top_k * width, width))
    return y


def _sort(
    expert_ids: Tensor, num_experts: int, block_size: int, slots: Tensor,
    num_padded: Tensor, block_experts: Tensor | None = None,
    positions: Tensor | None = None, starts: Tensor | None = None,
) -> None:  # fmt: skip
    """Sort the slots by expert, and write the requested outputs (those that are not None).

    Args:
        slots: output, see ``aligned_blocks``.
        num_padded: ``[1]``, output: entries in used blocks.
        block_experts: output, see ``aligned_blocks``.
        positions: output: index of every slot in ``slots``, -1 for skipped slots.
        starts: output: index of each expert's first slot.
    """
    num_slots, top_k = expert_ids.numel(), expert_ids.shape[1]
    ids = as_rows(expert_ids)
    parameters = parameters_for("expert_sort", ids.device)
    chunk = parameters.blocks["chunk"]
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    _count[(num_experts,)](
        ids, counts, num_slots, ids.stride(0), TOP_K=top_k, CHUNK=chunk, **parameters.compiled
    )
    # After one program per expert, further programs fill the unused entries.
    _place[(num_experts + triton.cdiv(slots.numel(), chunk),)](
        ids, counts, slots, num_padded, block_experts, positions, starts, num_slots, slots.numel(),
        ids.stride(0),
        TOP_K=top_k, NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK=block_size, PADDING=triton.next_power_of_2(block_size), CHUNK=chunk,
        **parameters.compiled,
    )  # fmt: skip


def _add_up(
    rows: Tensor,
    positions: Tensor | None,
    weights: Tensor | None,
    y: Tensor,
    strides: tuple[int, int],
    top_k: int = 0,
    *,
    gathered: bool = False,
) -> None:
    """Sum the expert rows of each token into ``y``.

    Args:
        positions: negative for skipped rows; otherwise the row number if ``gathered``.
        strides: elements from one token's first row to the next token's, and from row to row.
        top_k: rows of each token, if there are no positions.
    """
    num_tokens, width = y.shape
    if y.numel() == 0:
        return
    position_rows = None if positions is None else as_rows(positions)
    weight_rows = None if weights is None else as_rows(weights)
    tile = row_tile("moe_unpermute", y.device, width)
    _sum_rows[(tile.row_blocks(num_tokens), tile.column_blocks(width))](
        rows, position_rows, weight_rows, y, num_tokens, *strides,
        0 if position_rows is None else position_rows.stride(0),
        0 if weight_rows is None else weight_rows.stride(0),
        WIDTH=width, TOP_K=top_k if positions is None else positions.shape[1], GATHERED=gathered,
        **tile.options,
    )  # fmt: skip


@triton.jit
def _experts_of(ids, slot, num_slots, stride, TOP_K: tl.constexpr):
    """Load the expert ids of slots, -1 past the last slot."""
    offset = (slot // TOP_K).to(tl.int64) * stride + slot % TOP_K
    return tl.load(ids + offset, mask=slot < num_slots, other=-1)


@triton.jit
def _count(ids, counts, num_slots, stride, TOP_K: tl.constexpr, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    matches = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        matches += (_experts_of(ids, slot, num_slots, stride, TOP_K) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(matches, 0))


@triton.jit
def _place(
    ids, counts, slots, num_padded, block_experts, positions, starts, num_slots, num_places, stride,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    PADDING: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts + expert, mask=expert < NUM_EXPERTS, other=0)
    blocks = (count + (BLOCK - 1)) // BLOCK
    num_used_blocks = tl.sum(blocks, 0)
    # Every program computes the offsets of all experts itself, which needs no synchronization.
    if program == 0:
        tl.store(num_padded, num_used_blocks * BLOCK)
    if program < NUM_EXPERTS:
        first = tl.sum(tl.where(expert < program, blocks, 0), 0)
        end = first + tl.sum(tl.where(expert == program, blocks, 0), 0)
        if starts is not None:
            tl.store(starts + program, first * BLOCK)
        next_entry = first * BLOCK
        for start in range(0, num_slots, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            is_mine = _experts_of(ids, slot, num_slots, stride, TOP_K) == program
            # A running count keeps the slots of an expert in order.
            entry = next_entry + tl.cumsum(is_mine.to(tl.int32), 0) - 1
            tl.store(slots + entry, slot, mask=is_mine)
            if positions is not None:
                tl.store(positions + slot, entry, mask=is_mine)
            next_entry += tl.sum(is_mine.to(tl.int32), 0)
        padding = next_entry + tl.arange(0, PADDING)
        padding_value = tl.zeros_like(padding) + num_slots
        tl.store(slots + padding, padding_value, mask=padding < end * BLOCK)
        if block_experts is not None:
            for start in range(first, end, CHUNK):
                block = start + tl.arange(0, CHUNK)
                tl.store(block_experts + block, tl.zeros_like(block) + program, mask=block < end)
    else:
        number = (program - NUM_EXPERTS) * CHUNK + tl.arange(0, CHUNK)
        entry = num_used_blocks * BLOCK + number
        tl.store(slots + entry, tl.zeros_like(entry) + num_slots, mask=entry < num_places)
        if block_experts is not None:
            block = num_used_blocks + number
            unused = tl.zeros_like(block) - 1
            tl.store(block_experts + block, unused, mask=block < num_places // BLOCK)
        if positions is not None:
            is_skipped = _experts_of(ids, number, num_slots, stride, TOP_K) < 0
            no_position = tl.zeros_like(number) - 1
            tl.store(positions + number, no_position, mask=is_skipped & (number < num_slots))


@triton.jit
def _copy_rows(
    x, slots, rows, num_slots, stride,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    element_mask = (row < num_slots) & (column < WIDTH)
    slot = tl.load(slots + row, mask=row < num_slots, other=0)
    row_offset = (slot // TOP_K).to(tl.int64) * stride
    value = tl.load(x + row_offset + column, mask=element_mask & (slot < num_slots), other=0.0)
    tl.store(rows + row * WIDTH + column, value, mask=element_mask)


@triton.jit
def _sum_rows(
    rows, positions, weights, y, num_tokens, token_stride, row_stride, position_stride,
    weight_stride,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, GATHERED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token_mask = token < num_tokens
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for choice in range(TOP_K):
        row_offset = token * token_stride + choice * row_stride
        row_mask = token_mask
        if positions is not None:
            position = tl.load(
                positions + token * position_stride + choice, mask=token_mask, other=-1
            )
            row_mask = token_mask & (position >= 0)
            if GATHERED:
                row_offset = position.to(tl.int64) * row_stride
        element_mask = row_mask & (column < WIDTH)
        value = tl.load(rows + row_offset + column, mask=element_mask, other=0.0).to(tl.float32)
        if weights is not None:
            weight = weights + token * weight_stride + choice
            value *= tl.load(weight, mask=row_mask, other=0.0).to(tl.float32)
        total += value
    element_mask = token_mask & (column < WIDTH)
    tl.store(y + token * WIDTH + column, total.to(y.dtype.element_ty), mask=element_mask)


_FEW, _MANY = (INT32, 64, 6), (INT32, 4096, 6)  # choices of a decode and of a prefill step

BUILDS = (
    Build("moe_permute_triton", "6 of 64 experts, 2048 wide", given((BF16, 64, 2048), _FEW, 64)),
    Build(
        "moe_unpermute_triton",
        "6 rows of 2048",
        given((BF16, 4096 * 6, 2048), _MANY, (FP32, 4096, 6)),
    ),
)
