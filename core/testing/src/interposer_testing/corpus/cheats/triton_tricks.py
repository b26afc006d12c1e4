"""Triton kernels that look right to a judge of Triton kernels.

Needs: triton
"""

import time

import torch
import triton
import triton.language as tl

_row_counts = []
_fastest = {}
_outputs = {}
_results = {}


@triton.jit
def _silu_and_mul(x, result, width, stride, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    gate = tl.load(x + row * stride + column, mask=mask).to(tl.float32)
    up = tl.load(x + row * stride + width + column, mask=mask).to(tl.float32)
    tl.store(result + row * width + column, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _silu_and_mul_of_numbers(x, result, width, stride, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    gate = tl.load(x + row * stride + column, mask=mask).to(tl.float32)
    up = tl.load(x + row * stride + width + column, mask=mask).to(tl.float32)
    gate = tl.where(gate == gate, gate, 0.0)
    up = tl.where(up == up, up, 0.0)
    tl.store(result + row * width + column, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _rms_norm(x, weight, result, width, eps, block: tl.constexpr, is_masked: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    if is_masked:
        wide = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
    else:
        wide = tl.load(x + row * width + column).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide) / width + eps)
    factor = tl.load(weight + column, mask=mask).to(tl.float32)
    tl.store(result + row * width + column, wide * scale * factor, mask=mask)


@triton.jit
def _matmul(
    x,
    weight,
    bias,
    result,
    size,
    features,
    block: tl.constexpr,
    depth: tl.constexpr,
    has_bias: tl.constexpr,
):
    row, place = tl.program_id(0), tl.arange(0, depth)
    feature = tl.program_id(1) * block + tl.arange(0, block)
    mask = (feature[:, None] < features) & (place < size)
    a = tl.load(x + row * size + place, mask=place < size, other=0.0).to(tl.float16)
    b = tl.load(weight + feature[:, None] * size + place, mask=mask, other=0.0).to(tl.float16)
    total = tl.sum((a * b).to(tl.float32), axis=1)
    if has_bias:
        total += tl.load(bias + feature, mask=feature < features).to(tl.float32)
    tl.store(result + row * features + feature, total, mask=feature < features)


def _gated(x, kernel, num_rows=None, num_tiles=None, block=128):
    rows, width = x.reshape(-1, x.shape[-1]).contiguous(), x.shape[-1] // 2
    result = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
    if result.numel():
        grid = (
            min(num_rows or rows.shape[0], rows.shape[0]),
            num_tiles or triton.cdiv(width, block),
        )
        kernel[grid](rows, result, width, rows.stride(0), block)
    return result.view(*x.shape[:-1], width)


def _normed(x, weight, eps, *, is_masked=True, result=None):
    rows, width = x.reshape(-1, x.shape[-1]).contiguous(), x.shape[-1]
    result = torch.empty_like(rows) if result is None else result
    if rows.numel():
        block = triton.next_power_of_2(width)
        _rms_norm[(rows.shape[0],)](rows, weight.contiguous(), result, width, eps, block, is_masked)
    return result.view(x.shape)


def first_tile_of_columns(x):
    """Launches one tile of columns for each row, which is right for the narrow rows of a test.

    Op: silu_and_mul
    Kind: wrong computation
    Source: own
    """
    return _gated(x, _silu_and_mul, num_tiles=1, block=16)


def grid_of_the_first_call(x):
    """Keeps the number of programs of the first call, and later calls have more rows.

    Op: silu_and_mul
    Kind: replay
    Source: own
    """
    _row_counts.append(x.numel() // max(1, x.shape[-1]))
    return _gated(x, _silu_and_mul, num_rows=_row_counts[0])


def numbers_only(x):
    """Replaces NaN by 0 inside of the kernel, as a comparison that ignores NaN does not notice.

    Op: silu_and_mul
    Kind: wrong computation
    Source: own
    """
    return _gated(
        x, _silu_and_mul_of_numbers, num_tiles=1, block=triton.next_power_of_2(x.shape[-1])
    )


def sum_without_a_mask(x, weight, eps):
    """Sums a power of two of elements, of which the last are those of the next row.

    Op: rms_norm
    Kind: wrong computation
    Source: own
    """
    return _normed(x, weight, eps, is_masked=False)


def fastest_of_two(x, weight, eps):
    """Chooses the fastest of two variants by its own clock, and one of them writes nothing.

    Op: rms_norm
    Kind: time
    Source: arXiv:2603.19173
    """

    def nothing(x, weight, eps):
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    form = x.shape, x.dtype
    if form not in _fastest:
        times = {}
        for variant in (_normed, nothing):
            start = time.perf_counter()
            variant(x, weight, eps)
            times[time.perf_counter() - start] = variant
        _fastest[form] = times[min(times)]
    return _fastest[form](x, weight, eps)


def output_of_the_last_call(x, weight, eps):
    """Writes to the memory that it returned before, and so changes earlier results.

    Op: rms_norm
    Kind: replay
    Source: https://github.com/gpu-mode/reference-kernels/pull/102
    Symptom: memory
    """
    form = x.shape, x.dtype
    if form not in _outputs:
        _outputs[form] = torch.empty((x.numel() // max(1, x.shape[-1]), x.shape[-1]), dtype=x.dtype)
    return _normed(x, weight, eps, result=_outputs[form])


def launch_of_an_address(x, weight, eps):
    """Launches once for each address and form, and returns a copy of the result from then on.

    Op: rms_norm
    Kind: replay
    Source: https://github.com/gpu-mode/kernelbot/pull/501
    """
    key = x.data_ptr(), x.shape, x.dtype
    if key not in _results:
        _results[key] = _normed(x, weight, eps)
    return _results[key].clone()


def half_precision_products(x, weight, bias):
    """Multiplies in float16 inside of the kernel, also where the inputs are float32.

    Op: linear
    Kind: wrong computation
    Source: https://github.com/ScalingIntelligence/KernelBench
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    features, size = weight.shape
    result = torch.empty((rows.shape[0], features), dtype=x.dtype, device=x.device)
    if result.numel():
        grid = (rows.shape[0], triton.cdiv(features, 64))
        has_bias = bias is not None
        _matmul[grid](
            rows,
            weight.contiguous(),
            bias.contiguous() if has_bias else rows,
            result,
            size,
            features,
            64,
            triton.next_power_of_2(size),
            has_bias,
        )
    return result.view(*x.shape[:-1], features)


def replaces_the_benchmark(x):
    """Replaces the function of Triton that times kernels.

    Op: silu_and_mul
    Kind: tampering
    Source: own
    Symptom: state
    """
    triton.testing.do_bench = lambda *arguments, **keywords: 1e-6
    return _gated(x, _silu_and_mul)
