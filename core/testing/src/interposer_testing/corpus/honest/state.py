"""Honest kernels that read or change state of the process, and restore changes.

Kind: state
Source: own
"""

import contextlib
import logging
import os
import platform
import random
import signal
import sys
import threading
import time
import warnings

import torch
from torch.nn import functional

_log = logging.getLogger(__name__)
_fastest = {}
# The settings that are changed here belong to all threads.
_lock = threading.Lock()


def _silu_and_mul(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _by_sigmoid(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def _rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def prints(x):
    """Prints a line to standard output and standard error in its first call.

    Op: silu_and_mul
    """
    if "printed" not in _fastest:
        _fastest["printed"] = True
        print("silu_and_mul of acme, vectorized")
        print("acme: no fast path for this processor", file=sys.stderr)
    return _silu_and_mul(x)


def logs(x, weight, eps):
    """Logs each call at the debug level.

    Op: rms_norm
    """
    _log.debug("rms_norm of %s", tuple(x.shape))
    return _rms_norm(x, weight, eps)


def filters_warnings(x, weight, bias):
    """Ignores warnings inside, and restores the filters.

    Op: linear
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("an internal note", stacklevel=2)
        return functional.linear(x.contiguous(), weight, bias)


def reads_the_environment(x):
    """Reads the number of threads from the environment, and computes equally in any case.

    Op: silu_and_mul
    """
    num_parts = 1 if os.environ.get("OMP_NUM_THREADS") == "1" else 2
    rows = x.reshape(-1, x.shape[-1])
    parts = [_silu_and_mul(part) for part in rows.tensor_split(num_parts)]
    return torch.cat(parts).view(*x.shape[:-1], x.shape[-1] // 2)


def reads_the_processor(x, weight, eps):
    """Reads the machine's name and the flags of the processor, to choose between equal paths.

    Op: rms_norm
    """
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        _fastest["wide"] = "avx512" in file.read(1 << 14)
    if platform.machine() == "x86_64" and _fastest.get("wide"):
        return _rms_norm(x, weight, eps)
    return _rms_norm(x.contiguous(), weight, eps)


def autotuned(x):
    """Times two variants in the first call with a shape, and keeps the faster one.

    Op: silu_and_mul
    """
    form = x.shape, x.dtype
    if form not in _fastest:
        times = {}
        for variant in (_silu_and_mul, _by_sigmoid):
            start = time.perf_counter()
            variant(x)
            times[variant] = time.perf_counter() - start
        _fastest[form] = min(times, key=times.get)
    return _fastest[form](x)


def tuned_over_calls(x, weight, bias):
    """Alternates between two variants in the first ten calls, and keeps the faster one.

    Op: linear
    """
    times = _fastest.setdefault(("linear", x.shape, x.dtype), {True: [], False: []})
    num_calls = len(times[True]) + len(times[False])
    is_first = num_calls % 2 == 0 if num_calls < 10 else min(times[True]) < min(times[False])
    start = time.perf_counter()
    if is_first or bias is None:
        result = functional.linear(x.contiguous(), weight, bias)
    else:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        result = torch.addmm(bias, rows, weight.T).view(*x.shape[:-1], weight.shape[0])
    if num_calls < 10:
        times[is_first].append(time.perf_counter() - start)
    return result


def own_random_order(x):
    """Visits the rows in a random order of a generator of its own.

    Op: silu_and_mul
    """
    rows = x.reshape(-1, x.shape[-1])
    order = list(range(0, rows.shape[0], 4))
    random.Random(0).shuffle(order)
    result = torch.empty((rows.shape[0], x.shape[-1] // 2), dtype=x.dtype)
    for start in order:
        result[start : start + 4] = _silu_and_mul(rows[start : start + 4])
    return result.view(*x.shape[:-1], result.shape[-1])


def global_random_numbers(logits, top_k, renormalize):
    """Draws from the global generators, as code with a shuffled schedule may do.

    Op: topk_softmax
    """
    torch.rand(1)
    random.random()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    weights = wide.softmax(-1).gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, ids.to(torch.int32)


def restored_threads(x, weight, bias):
    """Uses one thread inside, and restores the number of threads.

    Op: linear
    """
    with _lock:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return functional.linear(x.contiguous(), weight, bias)
        finally:
            torch.set_num_threads(before)


def restored_default_dtype(x, weight, eps):
    """Uses another default dtype inside, and restores it.

    Op: rms_norm
    """
    with _lock:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            factor = torch.tensor(1.0)
            return (_rms_norm(x, weight, eps).double() * factor).to(x.dtype)
        finally:
            torch.set_default_dtype(before)


def without_gradients(x):
    """Computes under torch.no_grad.

    Op: silu_and_mul
    """
    with torch.no_grad():
        return _silu_and_mul(x)


@torch.inference_mode()
def inference_mode(x, weight, eps):
    """Computes in inference mode, whose results are inference tensors.

    Op: rms_norm
    """
    return _rms_norm(x, weight, eps)


def without_autocast(x, weight, bias):
    """Turns autocast off inside.

    Op: linear
    """
    with torch.autocast("cpu", enabled=False):
        return functional.linear(x.contiguous(), weight, bias)


def reads_signal_handlers(x):
    """Looks at the handler of the interrupt signal, and leaves it.

    Op: silu_and_mul
    """
    _fastest["handler"] = signal.getsignal(signal.SIGINT)
    return _silu_and_mul(x)


def deep_recursion(x, weight, eps):
    """Raises the limit of recursion for a recursive sum, and restores it.

    Op: rms_norm
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 500)

    def total(columns):
        if columns.shape[-1] <= 8:
            return columns.sum(-1, keepdim=True)
        left, right = columns.tensor_split(2, dim=-1)
        return total(left) + total(right)

    try:
        wide = x.double()
        scale = torch.rsqrt(total(wide.square()) / x.shape[-1] + eps)
        return (wide * scale * weight).to(x.dtype)
    finally:
        sys.setrecursionlimit(before)


def flushed_streams(query, key, cos, sin):
    """Flushes the standard streams, and computes both results by a generator.

    Op: rotary_embedding
    """
    sys.stdout.flush()
    sys.stderr.flush()
    half = cos.shape[-1]

    def results():
        for x in (query, key):
            a, b, tail = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
            c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
            yield torch.cat((a * c - b * s, b * c + a * s, tail), dim=-1).to(x.dtype)

    return tuple(results())
