# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernel for the causal convolution: each program computes some channels of one sequence.

T tokens, C channels, W taps, B sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP16, FP32, INT64, Build, dtype_name, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device


@triton_kernel("causal_convolution")
def causal_convolution_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, query_starts: Tensor,
    slots: Tensor, num_cached: Tensor, silu: bool,
) -> Tensor:  # fmt: skip
    """Compute ``causal_convolution`` in Triton: depthwise, over the last W tokens."""
    channels, taps = weight.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    tokens, columns, compiled = _tile(x.device, channels)
    _convolve[(triton.cdiv(channels, columns), len(slots))](
        x, weight, bias, windows, query_starts, slots, num_cached, y, x.stride(0),
        windows.stride(0),
        NUM_CHANNELS=channels, TAPS=taps, SILU=bool(silu), TOKENS=tokens, CHANNELS=columns,
        **compiled,
    )  # fmt: skip
    return y


@per_device
def _tile(device: torch.device, channels: int) -> tuple[int, int, dict[str, int]]:
    """Return the tokens and channels of a tile, and the launch options."""
    parameters = parameters_for("causal_convolution", device)
    columns = min(parameters.blocks["channels"], triton.next_power_of_2(channels))
    return parameters.blocks["tokens"], columns, parameters.compiled


@triton.jit
def _convolve(
    x, weight, bias, windows, query_starts, slots, num_cached, y, x_stride, window_stride,
    NUM_CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    BEFORE: tl.constexpr = TAPS - 1
    sequence = tl.program_id(1)
    first = tl.load(query_starts + sequence)
    last = tl.load(query_starts + sequence + 1)
    slot = tl.load(slots + sequence)
    has_window = (slot >= 0) & (tl.load(num_cached + sequence) > 0)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    channel_mask = channel < NUM_CHANNELS
    window = windows + slot * window_stride + channel * BEFORE
    total = tl.zeros([CHANNELS], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=channel_mask, other=0.0).to(tl.float32)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = (token < last)[:, None] & channel_mask[None, :]
        sums = tl.zeros([TOKENS, CHANNELS], tl.float32) + total[None, :]
        for tap in tl.static_range(TAPS):
            source = token - (BEFORE - tap)
            step_inputs = tl.load(
                x + source[:, None] * x_stride + channel[None, :],
                mask=inside & (source >= first)[:, None],
                other=0.0,
            )
            # Tokens before the step are in the window, the newest one last.
            window_column = source - first + BEFORE
            window_inputs = tl.load(
                window[None, :] + window_column[:, None],
                mask=inside & (source < first)[:, None] & has_window,
                other=0.0,
            )
            factor = tl.load(weight + channel * TAPS + tap, mask=channel_mask, other=0.0).to(
                tl.float32
            )
            inputs = tl.where((source >= first)[:, None], step_inputs, window_inputs).to(tl.float32)
            sums += inputs * factor[None, :]
        if SILU:
            sums = sums / (1.0 + tl.exp(-sums))
        sums = tl.where(slot >= 0, sums, 0.0)
        target = y + token[:, None] * NUM_CHANNELS + channel[None, :]
        tl.store(target, sums.to(y.dtype.element_ty), mask=inside)
    # All threads must have read the window before any thread overwrites it.
    tl.debug_barrier()
    store_mask = channel_mask & (slot >= 0) & (last > first)
    for column in tl.static_range(BEFORE):
        source = last - BEFORE + column
        in_step = store_mask & (source >= first)
        step_input = tl.load(x + source * x_stride + channel, mask=in_step, other=0.0)
        # The loop has not overwritten this column yet: it comes after the stored one.
        window_column = source - first + BEFORE
        in_window = store_mask & (source < first) & has_window
        window_input = tl.load(window + window_column, mask=in_window, other=0.0)
        new_input = tl.where(source >= first, step_input, window_input)
        tl.store(window + column, new_input, mask=store_mask)


def _build(label: str, taps: int, biased: bool, dtype: torch.dtype = BF16) -> Build:
    indices = (INT64, 33), (INT64, 32), (INT64, 32)
    bias = (dtype, 8192) if biased else None
    pool = (dtype, 64, 8192, taps - 1)
    arguments = given((dtype, 512, 8192), (dtype, 8192, taps), bias, pool, *indices, True)
    return Build("causal_convolution_triton", label, arguments, dtype_name(dtype))


BUILDS = (
    _build("8192 channels, four taps", 4, True),
    _build("three taps without a bias", 3, False),
    _build("float16, four taps", 4, True, FP16),
    _build("float32, four taps", 4, True, FP32),
)
