"""Penalties and sampling of the compiled library. B sequences, V vocabulary."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from interposer_cpu._kernels.interface import FLOAT32, TYPES
from interposer_cpu.native import library

_INT64 = torch.int64
# Bits of the library's ops: sample_out also writes logprobs; output counts are int64.
_LOGPROBS = 16
_LONG_COUNTS = 1

Column = torch.Tensor | None


def sample_tokens(
    logits: torch.Tensor,
    temperature: Column,
    top_k: Column,
    top_p: Column,
    min_p: Column,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op ``sample_tokens``: one token per row, and its log probability."""
    count = logits.shape[0]
    tokens = torch.empty(count, dtype=_INT64)
    logprobs = torch.empty(count, dtype=FLOAT32)
    # Without a temperature, sampling is an argmax, which needs no other column and no seeds.
    if temperature is not None or is_compiling():
        _sample(tokens, logprobs, logits, (temperature, top_k, top_p, min_p), seeds, steps)
        return tokens, logprobs
    logits = _with_rows(logits)
    start, kind = logits.data_ptr(), TYPES[logits.dtype]
    results = tokens.data_ptr(), logprobs.data_ptr()
    library().sample_tokens(
        start, kind, count, logits.shape[1], logits.stride(0), 0, 0, 0, 0, 0, 0, *results
    )
    return tokens, logprobs


def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """Compute the op ``gumbel_argmax``: draw one token per row from the softmax."""
    tokens = torch.empty(logits.shape[0], dtype=_INT64)
    _sample(tokens, None, logits, (temperature, None, None, None), seeds, steps)
    return tokens


def apply_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Compute the op ``apply_penalties``: repetition, presence and frequency."""
    count, width = logits.shape
    logits, prompt_mask, output_counts = map(_with_rows, (logits, prompt_mask, output_counts))
    columns = repetition.contiguous(), presence.contiguous(), frequency.contiguous()
    out = torch.empty(count, width, dtype=FLOAT32)
    size = output_counts.dtype.itemsize
    if is_compiling():
        parts = _LONG_COUNTS if size == 8 else 0
        torch.ops.interposer_cpu.penalise_out(
            out, logits, prompt_mask, output_counts, *columns, parts
        )
        return out
    library().penalise(
        logits.data_ptr(),
        TYPES[logits.dtype],
        size,
        count,
        width,
        logits.stride(0),
        prompt_mask.stride(0),
        output_counts.stride(0),
        prompt_mask.data_ptr(),
        output_counts.data_ptr(),
        *(column.data_ptr() for column in columns),
        out.data_ptr(),
    )
    return out


def _sample(
    tokens: torch.Tensor,
    logprobs: Column,
    logits: torch.Tensor,
    optional: tuple[Column, Column, Column, Column],
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> None:
    """Sample one token per row into ``tokens``, with ``logprobs`` unless None."""
    logits, seeds, steps = _with_rows(logits), seeds.contiguous(), steps.contiguous()
    columns = [None if column is None else column.contiguous() for column in optional]
    if is_compiling():
        # The op takes no None: the seeds stand for absent columns, and the bits say which are
        # present.
        parts = sum(1 << i for i, column in enumerate(columns) if column is not None)
        torch.ops.interposer_cpu.sample_out(
            tokens,
            tokens if logprobs is None else logprobs,
            logits,
            *(seeds if column is None else column for column in columns),
            seeds,
            steps,
            parts if logprobs is None else parts | _LOGPROBS,
        )
        return
    library().sample_tokens(
        logits.data_ptr(),
        TYPES[logits.dtype],
        logits.shape[0],
        logits.shape[1],
        logits.stride(0),
        *(0 if column is None else column.data_ptr() for column in columns),
        seeds.data_ptr(),
        steps.data_ptr(),
        tokens.data_ptr(),
        0 if logprobs is None else logprobs.data_ptr(),
    )


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[B, V]`` with contiguous rows; copy only if necessary."""
    return x if x.stride(1) == 1 else x.contiguous()
