"""Honest Triton kernels.

Kind: compilation
Source: own
Needs: triton
"""

import torch
import triton
import triton.language as tl

_partial_sums = {}


@triton.jit
def _silu(gate):
    return gate / (1 + tl.exp(-gate))


@triton.jit
def _silu_and_mul(x, result, width, stride, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    gate = tl.load(x + row * stride + column, mask=mask).to(tl.float32)
    up = tl.load(x + row * stride + width + column, mask=mask).to(tl.float32)
    tl.store(result + row * width + column, _silu(gate) * up, mask=mask)


@triton.jit
def _persistent_silu_and_mul(x, result, count, width, num_programs, block: tl.constexpr):
    for start in range(tl.program_id(0) * block, count, num_programs * block):
        place = start + tl.arange(0, block)
        mask = place < count
        source = x + (place // width) * 2 * width + place % width
        gate = tl.load(source, mask=mask).to(tl.float32)
        up = tl.load(source + width, mask=mask).to(tl.float32)
        tl.store(result + place, _silu(gate) * up, mask=mask)


@triton.heuristics({"block": lambda arguments: triton.next_power_of_2(arguments["width"])})
@triton.jit
def _rms_norm(x, weight, result, width, stride, eps, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    wide = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide) / width + eps)
    factor = tl.load(weight + column, mask=mask).to(tl.float32)
    tl.store(result + row * width + column, wide * scale * factor, mask=mask)


@triton.jit
def _sum_of_squares(x, sums, width, num_tiles, block: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * block + tl.arange(0, block)
    wide = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(sums + row * num_tiles + tile, tl.sum(wide * wide))


@triton.jit
def _scale_rows(x, weight, sums, result, width, num_tiles, eps, tiles: tl.constexpr):
    row = tl.program_id(0)
    tile = tl.arange(0, tiles)
    total = tl.sum(tl.load(sums + row * num_tiles + tile, mask=tile < num_tiles, other=0.0))
    scale = 1 / tl.sqrt(total / width + eps)
    for start in range(0, width, 64):
        column = start + tl.arange(0, 64)
        mask = column < width
        wide = tl.load(x + row * width + column, mask=mask).to(tl.float32)
        factor = tl.load(weight + column, mask=mask).to(tl.float32)
        tl.store(result + row * width + column, wide * scale * factor, mask=mask)


@triton.jit
def _linear(
    x,
    weight,
    bias,
    result,
    num_rows,
    size,
    features,
    block: tl.constexpr,
    depth: tl.constexpr,
    has_bias: tl.constexpr,
):
    row = tl.program_id(0) * block + tl.arange(0, block)
    feature = tl.program_id(1) * block + tl.arange(0, block)
    row_mask, feature_mask = row[:, None] < num_rows, feature[None, :] < features
    total = tl.zeros((block, block), dtype=tl.float32)
    for start in range(0, size, depth):
        place = start + tl.arange(0, depth)
        x_place, w_place = row[:, None] * size + place, feature[None, :] * size + place[:, None]
        x_mask, w_mask = row_mask & (place < size), feature_mask & (place[:, None] < size)
        a = tl.load(x + x_place, mask=x_mask, other=0.0)
        b = tl.load(weight + w_place, mask=w_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + feature[None, :], mask=feature_mask).to(tl.float32)
    place = row[:, None] * features + feature[None, :]
    tl.store(result + place, total, mask=row_mask & feature_mask)


@triton.jit
def _rotate(x, cos, sin, result, num_heads, size, half, block: tl.constexpr):
    head, token = tl.program_id(0), tl.program_id(0) // num_heads
    place = tl.arange(0, block)
    is_first, is_turned = place < half, place < 2 * half
    partner = tl.where(is_first, place + half, place - half)
    angle = tl.where(is_first, place, place - half)
    element = tl.load(x + head * size + place, mask=place < size).to(tl.float32)
    pair = tl.load(x + head * size + partner, mask=is_turned, other=0.0).to(tl.float32)
    c = tl.load(cos + token * half + angle, mask=is_turned, other=1.0).to(tl.float32)
    s = tl.load(sin + token * half + angle, mask=is_turned, other=0.0).to(tl.float32)
    turned = element * c + tl.where(is_first, -pair, pair) * s
    tl.store(result + head * size + place, tl.where(is_turned, turned, element), mask=place < size)


def tiles_of_columns(x):
    """Launches a program per row and tile of columns.

    Op: silu_and_mul
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    width = x.shape[-1] // 2
    result = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
    if result.numel():
        grid = (rows.shape[0], triton.cdiv(width, 128))
        _silu_and_mul[grid](rows, result, width, rows.stride(0), 128)
    return result.view(*x.shape[:-1], width)


def persistent_programs(x):
    """Launches three programs, each of which computes every third block.

    Op: silu_and_mul
    """
    rows, width = x.contiguous(), x.shape[-1] // 2
    result = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if count := result.numel():
        _persistent_silu_and_mul[(3,)](rows, result, count, width, 3, block=256)
    return result


def block_by_heuristic(x, weight, eps):
    """Lets a heuristic of Triton choose the block, and a function the grid.

    Op: rms_norm
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    result = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if result.numel():
        _rms_norm[lambda arguments: (rows.shape[0],)](
            rows, weight.contiguous(), result, x.shape[-1], rows.stride(0), eps
        )
    return result.view(x.shape)


def sums_in_kept_memory(x, weight, eps):
    """Launches twice: sums of tiles go to memory that is kept for each thread and form.

    Op: rms_norm
    """
    import threading

    rows, width = x.reshape(-1, x.shape[-1]).contiguous(), x.shape[-1]
    result = torch.empty_like(rows)
    if result.numel():
        num_tiles = triton.cdiv(width, 64)
        form = threading.get_ident(), rows.shape, x.device
        if form not in _partial_sums:
            _partial_sums[form] = torch.empty(rows.shape[0], num_tiles, device=x.device)
        sums = _partial_sums[form]
        _sum_of_squares[(rows.shape[0], num_tiles)](rows, sums, width, num_tiles, 64)
        tiles = triton.next_power_of_2(num_tiles)
        _scale_rows[(rows.shape[0],)](
            rows, weight.contiguous(), sums, result, width, num_tiles, eps, tiles
        )
    return result.view(x.shape)


def tiles_of_products(x, weight, bias):
    """Multiplies tiles with tl.dot.

    Op: linear
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    features, size = weight.shape
    result = torch.empty((rows.shape[0], features), dtype=x.dtype, device=x.device)
    if result.numel():
        grid = (triton.cdiv(rows.shape[0], 32), triton.cdiv(features, 32))
        weight = weight.contiguous()
        has_bias = bias is not None
        offset = bias.contiguous() if has_bias else weight
        shape = rows.shape[0], size, features
        _linear[grid](rows, weight, offset, result, *shape, 32, 64, has_bias)
    return result.view(*x.shape[:-1], features)


def a_program_per_head(query, key, cos, sin):
    """Rotates a head in each program, query and key in two launches.

    Op: rotary_embedding
    """
    half = cos.shape[-1]

    def rotated(x):
        heads, result = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if result.numel():
            size = x.shape[-1]
            block = triton.next_power_of_2(size)
            _rotate[(x.numel() // size,)](
                heads, cos.contiguous(), sin.contiguous(), result, x.shape[-2], size, half, block
            )
        return result

    return rotated(query), rotated(key)
