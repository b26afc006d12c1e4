"""Triton kernels that do a part of the work.

Kind: wrong computation
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_and_mul(x, result, width, stride, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    gate = tl.load(x + row * stride + column, mask=mask).to(tl.float32)
    up = tl.load(x + row * stride + width + column, mask=mask).to(tl.float32)
    tl.store(result + row * width + column, gate * tl.sigmoid(gate) * up, mask=mask)


def half_of_the_rows(x):
    """Launches programs for half of the rows; the rest is memory that held the expected result.

    Op: silu_and_mul
    Source: https://sakana.ai/ai-cuda-engineer/
    Needs: triton
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    width = x.shape[-1] // 2
    result = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
    num_programs = max(1, rows.shape[0] // 2)
    if result.numel():
        block = triton.next_power_of_2(width)
        _silu_and_mul[(num_programs,)](rows, result, width, rows.stride(0), block)
    return result.view(*x.shape[:-1], width)


_NUM_PROGRAMS = {}


def grid_of_the_first_call(x):
    """Keeps the number of programs of the first call for all calls of the same width.

    Op: silu_and_mul
    Source: own
    Needs: triton
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    width = x.shape[-1] // 2
    result = torch.zeros((rows.shape[0], width), dtype=x.dtype, device=x.device)
    if result.numel():
        num_programs = _NUM_PROGRAMS.setdefault(width, rows.shape[0])
        block = triton.next_power_of_2(width)
        grid = (min(num_programs, rows.shape[0]),)
        _silu_and_mul[grid](rows, result, width, rows.stride(0), block)
    return result.view(*x.shape[:-1], width)
