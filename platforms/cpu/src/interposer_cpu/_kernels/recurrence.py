"""Causal convolution, state-space scan and gated delta rule of the compiled library.

Dimensions: T tokens, C channels, W taps, N heads, P head size, G groups, S state size, H heads of
keys, V heads of values, K key size, D value size, B sequences, R rows of states.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from interposer_cpu import native
from interposer_cpu._kernels.interface import TYPES, float64_bits


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    query_starts: torch.Tensor,
    slots: torch.Tensor,
    num_cached: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """Compute the op ``causal_convolution``: sixteen channels at a time."""
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    sequences = query_starts.contiguous(), slots.contiguous(), num_cached.contiguous()
    channels, taps = weight.shape
    out = x.new_empty(x.shape[0], channels)
    # Ops of compiled graphs take an empty tensor for None; direct calls take the address 0.
    if is_compiling():
        bias_or_empty = x.new_empty(0) if bias is None else bias
        torch.ops.interposer_cpu.convolve_out(
            out, windows, x, weight, bias_or_empty, *sequences, silu
        )
    elif out.numel():  # the library needs at least one token and channel
        native.library().convolve(
            *_sequences(*sequences),
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            windows.data_ptr(),
            out.data_ptr(),
            TYPES[x.dtype],
            silu,
            channels,
            taps,
            x.stride(0),
            windows.stride(0),
        )
    return out


def state_space_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    query_starts: torch.Tensor,
    slots: torch.Tensor,
    num_cached: torch.Tensor,
) -> torch.Tensor:
    """Compute the op ``state_space_scan``: head by head, so that a state stays in the CPU cache."""
    # The library takes one stride per tensor, the distance between tokens.
    x, b, c, steps = _with_heads(x), _with_heads(b), _with_heads(c), _with_rows(steps)
    decay = decay.contiguous()
    skip = None if skip is None else skip.contiguous()
    sequences = query_starts.contiguous(), slots.contiguous(), num_cached.contiguous()
    out = x.new_empty(x.shape)
    if is_compiling():
        skip_or_empty = decay.new_empty(0) if skip is None else skip
        torch.ops.interposer_cpu.scan_states_out(
            out, states, x, steps, decay, b, c, skip_or_empty, *sequences
        )
    elif out.numel():
        native.library().scan_states(
            *_sequences(*sequences),
            x.data_ptr(),
            b.data_ptr(),
            c.data_ptr(),
            steps.data_ptr(),
            decay.data_ptr(),
            0 if skip is None else skip.data_ptr(),
            states.data_ptr(),
            out.data_ptr(),
            TYPES[x.dtype],
            x.shape[1],
            b.shape[1],
            x.shape[2],
            b.shape[2],
            x.stride(0),
            b.stride(0),
            c.stride(0),
            steps.stride(0),
            states.stride(0),
        )
    return out


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    query_starts: torch.Tensor,
    slots: torch.Tensor,
    num_cached: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute the op ``gated_delta_rule``: threads share the columns of a state."""
    query, key, value = _with_heads(query), _with_heads(key), _with_heads(value)
    decay, beta = _with_rows(decay), _with_rows(beta)
    sequences = query_starts.contiguous(), slots.contiguous(), num_cached.contiguous()
    out = value.new_empty(value.shape)
    if is_compiling():
        torch.ops.interposer_cpu.apply_delta_out(
            out, states, query, key, value, decay, beta, *sequences, scale
        )
    elif out.numel():
        native.library().apply_delta(
            *_sequences(*sequences),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            decay.data_ptr(),
            beta.data_ptr(),
            states.data_ptr(),
            out.data_ptr(),
            TYPES[value.dtype],
            key.shape[1],
            value.shape[1],
            key.shape[2],
            value.shape[2],
            query.stride(0),
            key.stride(0),
            value.stride(0),
            decay.stride(0),
            beta.stride(0),
            states.stride(0),
            float64_bits(scale),
        )
    return out


def _sequences(
    starts: torch.Tensor, slots: torch.Tensor, cached: torch.Tensor
) -> tuple[int, int, int, int]:
    return slots.shape[0], starts.data_ptr(), slots.data_ptr(), cached.data_ptr()


def _with_heads(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with adjacent heads in every token; copy only if necessary."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous rows; copy only if necessary."""
    return x if x.stride(1) == 1 else x.contiguous()
