"""Honest kernels that keep memory and values between calls.

Kind: memory
Source: own
"""

import ctypes
import gc
import mmap
import tempfile
import threading
import weakref
from collections import OrderedDict
from functools import cache, lru_cache

import torch
from torch.nn import functional

_of_thread = threading.local()  # calls can overlap
_results = OrderedDict()
_seen = weakref.WeakValueDictionary()
_statistics = {"calls": 0}


def _silu_and_mul(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _scratch():
    return _of_thread.__dict__.setdefault("scratch", {})


def _rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def scratch_by_shape(x):
    """Keeps a scratch buffer for each shape, and returns a fresh tensor.

    Op: silu_and_mul
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    key = x.shape, wide
    buffer = _scratch().setdefault(key, torch.empty(x.shape, dtype=wide))
    buffer.copy_(x)
    gate, up = buffer.chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype, copy=True)


def growing_workspace(x, weight, eps):
    """Keeps one workspace that grows to the largest request, as libraries of matmuls do.

    Op: rms_norm
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    workspace = _scratch().get("workspace")
    if workspace is None or workspace.numel() < x.numel() or workspace.dtype != wide:
        workspace = _scratch()["workspace"] = torch.empty(max(x.numel(), 1), dtype=wide)
    squares = workspace[: x.numel()].view(x.shape)
    torch.square(x.to(wide), out=squares)
    scale = torch.rsqrt(squares.mean(-1, keepdim=True) + eps)
    return (x.to(wide) * scale * weight).to(x.dtype)


def output_by_out_argument(x, weight, bias):
    """Allocates the output itself and lets the operator write into it.

    Op: linear
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    result = torch.empty((rows.shape[0], weight.shape[0]), dtype=x.dtype)
    if bias is None:
        torch.mm(rows, weight.T, out=result)
    else:
        torch.addmm(bias, rows, weight.T, out=result)
    return result.view(*x.shape[:-1], weight.shape[0])


def remembered_by_full_content(x):
    """Remembers the last results by the complete bytes of the input, so that none is stale.

    Op: silu_and_mul
    """
    key = _content(x)
    if key not in _results:
        _results[key] = _silu_and_mul(x)
        while len(_results) > 2:
            _results.popitem(last=False)
    return _results[key].clone()


def _content(x):
    dense = x.contiguous()
    num_bytes = dense.numel() * dense.element_size()
    return x.shape, x.dtype, ctypes.string_at(dense.data_ptr(), num_bytes) if num_bytes else b""


@lru_cache(maxsize=16)
def _identity(size, dtype):
    return torch.eye(size, dtype=dtype)


def constants_of_sizes(logits, top_k, renormalize):
    """Keeps tables that depend on sizes and dtypes only, in an lru_cache.

    Op: topk_softmax
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    weights = wide.softmax(-1).gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    ones = _identity(1, weights.dtype)
    return weights * ones[0, 0], ids.to(torch.int32)


@cache
def _halves(width):
    return torch.arange(0, width // 2), torch.arange(width // 2, width)


def index_tables(x):
    """Gathers the halves by index tables that it keeps for each width.

    Op: silu_and_mul
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = _halves(x.shape[-1])
    return (functional.silu(wide[..., first]) * wide[..., second]).to(x.dtype).contiguous()


def weak_references(x, weight, eps):
    """Counts living inputs by weak references, and changes nothing by it.

    Op: rms_norm
    """
    _seen[id(x)] = x
    _statistics["living"] = len(_seen)
    return _rms_norm(x, weight, eps)


def collects_garbage(x, weight, bias):
    """Collects garbage before it allocates.

    Op: linear
    """
    if _statistics["calls"] % 8 == 0:
        gc.collect(0)
    _statistics["calls"] += 1
    return functional.linear(x.contiguous(), weight, bias)


def counts_calls(x):
    """Counts its calls by shape, for a statistic that it never prints.

    Op: silu_and_mul
    """
    key = "x".join(map(str, x.shape))
    _statistics[key] = _statistics.get(key, 0) + 1
    return _silu_and_mul(x)


def temporary_file(x, weight, eps):
    """Passes the statistic of rows through a temporary file.

    Op: rms_norm
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    with tempfile.TemporaryFile() as file:
        torch.save(torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), file)
        file.seek(0)
        scale = torch.load(file, weights_only=True)
    return (wide * scale * weight).to(x.dtype)


def memory_map(x):
    """Computes in an anonymous memory map of its own.

    Op: silu_and_mul
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    size = max(1, x.numel()) * torch.empty(0, dtype=wide).element_size()
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=wide)[: x.numel()].view(x.shape)
    buffer.copy_(x)
    gate, up = buffer.chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype, copy=True)


def byte_array(query, key, cos, sin):
    """Keeps the doubled table of angles in a bytearray and reads it by a memoryview.

    Op: rotary_embedding
    """

    def doubled(table):
        two = torch.cat((table, table), dim=-1).contiguous()
        if not two.numel():
            return two
        content = bytearray(two.flatten().view(torch.uint8).tolist())
        return torch.frombuffer(memoryview(content), dtype=two.dtype).view(two.shape)

    cos, sin = doubled(cos).unsqueeze(-2), doubled(sin).unsqueeze(-2)

    def rotated(x):
        size = cos.shape[-1]
        head, tail = x[..., :size].to(cos.dtype), x[..., size:].to(cos.dtype)
        a, b = head.chunk(2, dim=-1)
        turned = head * cos + torch.cat((-b, a), dim=-1) * sin
        return torch.cat((turned, tail), dim=-1).to(x.dtype)

    return rotated(query), rotated(key)


def in_place_on_a_copy(query, key, cos, sin):
    """Rotates copies in place and returns the copies.

    Op: rotary_embedding
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def rotated(x):
        result = x.to(cos.dtype, copy=True, memory_format=torch.contiguous_format)
        a, b = result[..., :half].clone(), result[..., half : 2 * half].clone()
        result[..., :half].mul_(cos).sub_(b * sin)
        result[..., half : 2 * half].mul_(cos).add_(a * sin)
        return result.to(x.dtype)

    return rotated(query), rotated(key)


def two_outputs_of_one_buffer_copied(query, key, cos, sin):
    """Computes both outputs in one scratch buffer, and returns a copy of each part.

    Op: rotary_embedding
    """
    half = cos.shape[-1]
    both = torch.cat((query, key), dim=1).to(cos.dtype)
    a, b, tail = both.tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin, tail), dim=-1).to(query.dtype)
    first, second = rotated.tensor_split((query.shape[1],), dim=1)
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in (first, second))
