"""Honest kernels with threads, processes and tasks that end before the kernel returns.

Kind: threads
Source: own
"""

import asyncio
import contextvars
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional

_pool = []
_lock = threading.RLock()
_local = threading.local()
_depth = contextvars.ContextVar("depth", default=0)


def _silu_and_mul(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def joined_threads(x):
    """Starts two threads, each for half of the rows, and joins both.

    Op: silu_and_mul
    """
    rows = x.reshape(-1, x.shape[-1])
    result = torch.empty((rows.shape[0], x.shape[-1] // 2), dtype=x.dtype)
    parts = zip(rows.tensor_split(2), result.tensor_split(2), strict=True)
    threads = [
        threading.Thread(target=lambda target, part: target.copy_(_silu_and_mul(part)), args=pair)
        for pair in ((target, part) for part, target in parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result.view(*x.shape[:-1], result.shape[-1])


def pool_for_all_calls(x, weight, eps):
    """Keeps a pool of threads between calls, and waits for its results.

    Op: rms_norm
    """
    if not _pool:
        _pool.append(ThreadPoolExecutor(2))
    rows = x.reshape(-1, x.shape[-1])
    parts = _pool[0].map(lambda part: _rms_norm(part, weight, eps), rows.tensor_split(2))
    return torch.cat(list(parts)).view(x.shape)


def pool_for_one_call(x, weight, bias):
    """Starts a pool for the call and shuts it down.

    Op: linear
    """
    with ThreadPoolExecutor(2) as pool:
        future = pool.submit(functional.linear, x.contiguous(), weight, bias)
        return future.result()


def waiting_worker(query, key, cos, sin):
    """Hands the key to a worker thread that waits for more after the call.

    Op: rotary_embedding
    """
    half = cos.shape[-1]

    def rotated(x):
        a, b, tail = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((a * c - b * s, b * c + a * s, tail), dim=-1).to(x.dtype)

    if not hasattr(_local, "tasks"):
        _local.tasks, _local.results = queue.SimpleQueue(), queue.SimpleQueue()
        tasks, results = _local.tasks, _local.results

        def work():
            while True:
                function, x = tasks.get()
                results.put(function(x))
                del function, x

        threading.Thread(target=work, daemon=True).start()
    _local.tasks.put((rotated, key))
    return rotated(query), _local.results.get()


def event_loop(x):
    """Runs two coroutines in an event loop of its own until both end.

    Op: silu_and_mul
    """

    async def compute(part):
        await asyncio.sleep(0)
        return _silu_and_mul(part)

    async def both():
        rows = x.reshape(-1, x.shape[-1])
        return await asyncio.gather(*map(compute, rows.tensor_split(2)))

    return torch.cat(asyncio.run(both())).view(*x.shape[:-1], x.shape[-1] // 2)


def locked(logits, top_k, renormalize):
    """Computes under a lock, with a context variable.

    Op: topk_softmax
    """
    with _lock:
        token = _depth.set(_depth.get() + 1)
        try:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            order = wide.sort(dim=-1, descending=True, stable=True).indices
            ids = order[..., :top_k].contiguous()
            weights = wide.softmax(-1).gather(-1, ids)
            if renormalize:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return weights, ids.to(torch.int32)
        finally:
            _depth.reset(token)


def future_of_torch(x, weight, eps):
    """Lets a thread set the row statistic in a future of torch, and waits for it.

    Op: rms_norm
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    future = torch.futures.Future()

    def compute():
        future.set_result(torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))

    thread = threading.Thread(target=compute)
    thread.start()
    scale = future.wait()
    thread.join()
    return (wide * scale * weight).to(x.dtype)
