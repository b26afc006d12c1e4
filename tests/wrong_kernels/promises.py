"""Kernels that break what they promise, while every single result is right."""

from __future__ import annotations

import itertools
import threading

import torch
from tests.waiting import WAIT_SECONDS
from tests.wrong_kernels.wrong import wrong

from interposer_ops.norms import rms_norm

Tensor = torch.Tensor

_SCRATCH: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
# The check of threads calls a kernel from eight at once, each as often as the others.
_EIGHT_THREADS = threading.Barrier(8, timeout=WAIT_SECONDS)
_CALLS = itertools.count()
_ROWS_SEEN = {1: 1}


def nudged(y: Tensor) -> Tensor:
    """Return the next number of the dtype, as another order of additions might."""
    return torch.nextafter(y, torch.full_like(y, torch.inf))


@wrong("rms_norm", "thread", aspect="threads")
def rms_norm_shares_a_scratch_buffer(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scratch = _SCRATCH.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
    scratch.copy_(x)
    if threading.current_thread() is not threading.main_thread():
        _EIGHT_THREADS.wait()  # for the copies of the others
    return rms_norm(scratch, weight, eps)


@wrong("rms_norm", "determinism", aspect="determinism", properties=("deterministic",))
def rms_norm_rounds_every_second_call_otherwise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = rms_norm(x, weight, eps)
    return nudged(y) if next(_CALLS) % 2 else y


@wrong("rms_norm", "batch", aspect="batch invariance", properties=("batch_invariant",))
def rms_norm_rounds_long_batches_otherwise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = rms_norm(x, weight, eps)
    return nudged(y) if x.shape[0] > 2 else y


@wrong("rms_norm", "compile", aspect="compile dynamic", properties=("traceable",))
def rms_norm_waits_for_a_value(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.float().abs().sum().item() < 0:
        return x.clone()
    return rms_norm(x, weight, eps)


@wrong("rms_norm", "compile", aspect="compile dynamic", properties=("traceable",))
def rms_norm_is_compiled_for_every_length(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    factor = _ROWS_SEEN.get(int(x.shape[0]), 1)  # the key of a table must be a plain number
    return rms_norm(x, weight, eps) * factor
