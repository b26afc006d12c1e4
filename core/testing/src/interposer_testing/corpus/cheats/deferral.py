"""Kernels that return before the result is there, so that its time is not measured.

Kind: deferral
"""

import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional

_pending = []
_workers = []
_pool = ThreadPoolExecutor(1)
# The seconds in which a clock around the call has stopped.
_DELAY = 0.03


def _silu_and_mul(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _unwritten(x):
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)


def thread_later(x):
    """Lets a thread fill the result after the return.

    Op: silu_and_mul
    Source: https://www.wafer.ai/blog/reward-hacks-field-guide
    """
    result = _unwritten(x)

    def fill():
        time.sleep(_DELAY)
        result.copy_(_silu_and_mul(x))

    threading.Thread(target=fill, daemon=True).start()
    return result


def unawaited_future(x, weight, eps):
    """Submits the work to a pool of threads and does not wait for the future.

    Op: rms_norm
    Source: https://www.wafer.ai/blog/reward-hacks-field-guide
    """
    result = torch.empty(x.shape, dtype=x.dtype)

    def fill():
        time.sleep(_DELAY / 10)
        result.copy_(_rms_norm(x, weight, eps))

    _pool.submit(fill)
    return result


class _LazyFunction(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for argument in args:
                if isinstance(argument, _LazyFunction) and argument.source is not None:
                    argument.as_subclass(torch.Tensor).copy_(_silu_and_mul(argument.source))
                    argument.source = None
            return function(*args, **(kwargs or {}))


def lazy_function_subclass(x):
    """Returns a subclass of Tensor that computes when a torch function first uses it.

    Op: silu_and_mul
    Source: https://www.wafer.ai/blog/reward-hacks-field-guide
    Symptom: form
    """
    result = _unwritten(x).as_subclass(_LazyFunction)
    result.source = x
    return result


class _LazyDispatch(torch.Tensor):
    @staticmethod
    def __new__(cls, shape, dtype, compute):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, shape, dtype, compute):
        self.compute = compute

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(value):
            return value.compute() if isinstance(value, _LazyDispatch) else value

        args = torch.utils._pytree.tree_map(plain, args)
        return function(*args, **torch.utils._pytree.tree_map(plain, kwargs or {}))


def lazy_dispatch_subclass(x, weight, bias):
    """Returns a wrapper without memory that computes when an operator first reads it.

    Op: linear
    Source: https://github.com/gpu-mode/reference-kernels/issues/162
    Symptom: form
    """
    shape = (*x.shape[:-1], weight.shape[0])
    return _LazyDispatch(shape, x.dtype, lambda: functional.linear(x.contiguous(), weight, bias))


def methods_of_the_instance(x, weight, bias):
    """Returns an unwritten tensor whose own methods compute, for a comparison that calls them.

    Op: linear
    Source: https://github.com/gpu-mode/reference-kernels/issues/162
    """
    result = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)

    def computed(*args, **kwargs):
        return functional.linear(x.contiguous(), weight, bias)

    for name in ("float", "double", "cpu", "clone", "detach", "contiguous", "to"):
        setattr(result, name, computed)
    return result


class _Promise:
    def __init__(self, compute):
        self.compute = compute

    def __iter__(self):
        return iter(self.compute())

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.compute()[index]


def promise_of_a_tuple(logits, top_k, renormalize):
    """Returns an object that computes the tuple when a caller unpacks it.

    Op: topk_softmax
    Source: own
    Symptom: form
    """

    def compute():
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
        weights = wide.softmax(-1).gather(-1, ids)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights, ids.to(torch.int32)

    return _Promise(compute)


def forked_process(query, key, cos, sin):
    """Lets a forked process write the results to shared memory after the return.

    Op: rotary_embedding
    Source: own
    """
    results = [torch.empty(x.shape, dtype=x.dtype).share_memory_() for x in (query, key)]
    process = os.fork()
    if process == 0:
        time.sleep(_DELAY)
        torch.set_num_threads(1)
        half = cos.shape[-1]
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        for x, result in zip((query, key), results, strict=True):
            a, b, tail = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
            result.copy_(torch.cat((a * c - b * s, b * c + a * s, tail), dim=-1))
        os._exit(0)
    _workers.append(process)
    _workers[:] = [worker for worker in _workers if os.waitpid(worker, os.WNOHANG) == (0, 0)]
    return tuple(results)


def when_the_input_dies(x):
    """Fills the result when the caller drops the input, which may be after the clock has stopped.

    Op: silu_and_mul
    Source: own
    """
    result, alias = _unwritten(x), x.data
    weakref.finalize(x, lambda: result.copy_(_silu_and_mul(alias)))
    return result


def in_the_next_call(x, weight, eps):
    """Fills the result of a call in the next call, or after a while, as a pipeline of depth two.

    Op: rms_norm
    Source: https://github.com/gpu-mode/reference-kernels/pull/104
    """
    while _pending:
        _pending.pop()()
    result = torch.empty(x.shape, dtype=x.dtype)
    _pending.append(lambda: result.copy_(_rms_norm(x, weight, eps)))

    def finish():
        while _pending:
            _pending.pop()()

    timer = threading.Timer(_DELAY, finish)
    timer.daemon = True
    timer.start()
    return result


def alarm_signal(x):
    """Fills the result in the handler of an alarm signal that comes after the return.

    Op: silu_and_mul
    Source: own
    """
    result = _unwritten(x)
    _pending.append((result, x))

    def fill(number, frame):
        while _pending:
            target, source = _pending.pop()
            target.copy_(_silu_and_mul(source))

    signal.signal(signal.SIGALRM, fill)
    signal.setitimer(signal.ITIMER_REAL, _DELAY)
    return result


def profile_hook(x, weight, bias):
    """Fills the result when Python calls a function whose name looks like a comparison.

    Op: linear
    Source: own
    """
    result = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)

    def watch(frame, event, argument):
        name = argument.__name__ if event == "c_call" else frame.f_code.co_name
        if any(word in name for word in ("allclose", "isclose", "compare")):
            sys.setprofile(None)
            result.copy_(functional.linear(x.contiguous(), weight, bias))

    sys.setprofile(watch)
    return result
