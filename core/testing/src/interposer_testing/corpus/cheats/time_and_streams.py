"""Kernels that are fast only for the clock that measures them.

Kind: time
"""

import threading
import time

import torch
from torch.nn import functional

_calls = 0
_graphs = {}
_busy = []


def _silu_and_mul(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def slow_warm_up(x):
    """Sleeps in the first calls, so that a judge with a time limit makes few, and is wrong later.

    Op: silu_and_mul
    Source: https://github.com/gpu-mode/pygpubench/pull/7
    """
    global _calls
    _calls += 1
    if _calls > 6:
        return torch.zeros((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    time.sleep(0.1)
    return _silu_and_mul(x)


def warm_up_only(x, weight, bias):
    """Computes until two calls in a row have equal shapes, which only timed calls have.

    Op: linear
    Source: https://github.com/gpu-mode/reference-kernels/pull/142
    """
    shape = (*x.shape[:-1], weight.shape[0])
    form = x.shape, weight.shape, x.dtype
    _graphs[form] = _graphs.get(form, 0) + 1
    if _graphs[form] > 4:
        return torch.empty(shape, dtype=x.dtype)
    return functional.linear(x.contiguous(), weight, bias)


def busy_threads(x, weight, eps):
    """Starts threads that slow the baseline, which is measured after the kernel.

    Op: rms_norm
    Source: arXiv:2507.14111
    Symptom: state
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not _busy:
        end = time.monotonic() + 5

        def spin():
            while time.monotonic() < end:
                pass

        _busy.append(threading.Thread(target=spin, daemon=True))
        _busy[0].start()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def side_stream(x):
    """Computes on a stream of its own and returns before the stream ends.

    Op: silu_and_mul
    Source: https://www.wafer.ai/blog/reward-hacks-field-guide
    Needs: cuda
    """
    result = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    stream = torch.cuda.Stream(x.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        result.copy_(_silu_and_mul(x))
    return result


def graph_of_the_first_input(x):
    """Captures a graph with the first input of a shape and replays it without the new input.

    Op: silu_and_mul
    Source: https://github.com/gpu-mode/reference-kernels/pull/104
    Needs: cuda
    """
    form = x.shape, x.dtype
    if form not in _graphs:
        source = x.clone()
        _silu_and_mul(source)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = _silu_and_mul(source)
        _graphs[form] = graph, source, result
    graph, _, result = _graphs[form]
    graph.replay()
    return result.clone()


def one_launch_for_many(x, weight, eps):
    """Computes a batch of repeated inputs in one launch and hands out the rest in later calls.

    Op: rms_norm
    Source: https://github.com/gpu-mode/reference-kernels/pull/104
    Needs: cuda
    """
    form = x.shape, x.dtype
    ready = _graphs.setdefault(form, [])
    if not ready:
        wide = x.float()
        result = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(
            x.dtype
        )
        ready.extend(result.clone() for _ in range(15))
    return ready.pop()


def unsynchronized_copy(x, weight, bias):
    """Returns a buffer that a copy on another stream still fills from pinned memory.

    Op: linear
    Source: arXiv:2603.19173
    Needs: cuda
    """
    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        return functional.linear(x.contiguous(), weight, bias)
