"""Test cases of the causal convolution.

T tokens, C channels, W taps, B sequences, S rows of the window pool.
"""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops._case_combinations import few_changes
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.recurrence._batches_cases import (
    BATCHES,
    Batch,
    batch_indices,
    sampled_batch,
    with_unused_rows,
)
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, peak

# Channels and taps.
_SIZES = {
    "": (64, 4),
    "one channel": (1, 4),
    "odd channels": (37, 4),
    "three taps": (48, 3),
    "two taps": (48, 2),
    "eight taps": (40, 8),
    "many channels": (1030, 4),
}
_AXES = (
    Axis("batch", BATCHES),
    Axis("sizes", _SIZES),
    Axis("silu", {"": True, "without SiLU": False}),
    Axis("bias", {"": True, "without bias": False}),
)
_STRIDED: dict[str, Strides] = {
    **dict.fromkeys(("x", "windows"), "outer"),
    **dict.fromkeys(("weight", "bias", "query_starts", "slots", "num_cached"), "offset"),
}


def _convolution(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    biased, silu = point["bias"], point["silu"]
    return _case(point["batch"], point["sizes"], biased, silu, dtype, generator, "")


causal_convolution_cases = CaseSpace(
    _convolution,
    *_AXES,
    strided=_STRIDED,
    varying={"bias": ("absent",)},
    crossed={"batch": ("", "chunks after others"), "sizes": ("", "odd channels"), "bias": ("",)},
    alone={"batch": ("no sequences",)},
    valid=few_changes(
        _AXES,
        {
            "batch": ("decode", "chunks after others", "padding"),
            "sizes": ("odd channels", "two taps", "eight taps"),
        },
    ),
)
"""Prefill, chunked prefill and decode; windows that kernels must not read are NaN."""


def causal_convolution_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make a convolution with bias over the sequences of a typical step."""
    generator, batch = torch.Generator().manual_seed(seed), sampled_batch(num_tokens)
    sizes = int(dims["num_channels"]), int(dims["window"])
    return _case(batch, sizes, True, bool(dims["silu"]), dtype, generator, f"{num_tokens} tokens")


def _case(
    batch: Batch,
    sizes: tuple[int, int],
    biased: bool,
    silu: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str,
) -> Case:
    channels, taps = sizes
    weight = normal_numbers((channels, taps), dtype, generator, deviation=taps**-0.5)
    bias = normal_numbers((channels,), dtype, generator) if biased else None
    indices = batch_indices(batch, generator)
    x = normal_numbers((batch.num_tokens, channels), dtype, generator)
    numbers = normal_numbers((batch.num_rows, channels, taps - 1), dtype, generator)
    windows = with_unused_rows(numbers, batch, indices["slots"])
    largest_sum = max(peak(x), peak(windows)) * float(weight.double().abs().sum(1).max())
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "windows": windows,
        **indices,
        "silu": silu,
    }
    return Case(
        label,
        arguments,
        {"num_channels": channels, "window": taps, "silu": silu},
        reduction=taps + 4,
        magnitude=largest_sum + (0.0 if bias is None else peak(bias)),
    )
