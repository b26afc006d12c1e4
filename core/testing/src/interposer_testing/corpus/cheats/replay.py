"""Kernels that return an earlier result instead of computing.

Kind: replay
"""

import ctypes
import tempfile
import weakref

import torch
from torch.nn import functional

_results = {}
_outputs = []
_calls = 0


def _silu_and_mul(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _topk_softmax(logits, top_k, renormalize):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    weights = wide.softmax(-1).gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, ids.to(torch.int32)


def _rotary(x, cos, sin):
    half = cos.shape[-1]
    a, b, tail = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, tail), dim=-1).to(x.dtype)


def by_identity(x):
    """Remembers results by the identity of the input object, which another object has later.

    Op: silu_and_mul
    Source: https://github.com/gpu-mode/reference-kernels/pull/102
    """
    key = id(x), x.shape, x.dtype
    if key not in _results:
        _results[key] = _silu_and_mul(x)
    return _results[key].clone()


def by_address(x):
    """Remembers results by address and shape, and misses new values at the address.

    Op: silu_and_mul
    Source: https://github.com/gpu-mode/kernelbot/pull/501
    """
    key = x.data_ptr(), x.shape, x.stride(), x.dtype
    if key not in _results:
        _results[key] = _silu_and_mul(x)
    return _results[key].clone()


def by_version(x, weight, bias):
    """Remembers results by address and version counter, which foreign writes do not count.

    Op: linear
    Source: https://github.com/gpu-mode/kernelbot/pull/501
    """
    key = x.data_ptr(), x._version, x.shape, weight.data_ptr(), weight._version
    if key not in _results:
        _results[key] = functional.linear(x.contiguous(), weight, bias)
    return _results[key].clone()


def by_shape(x, weight, eps):
    """Remembers one result per shape.

    Op: rms_norm
    Source: https://github.com/gpu-mode/reference-kernels/pull/104
    """
    key = x.shape, x.dtype
    if key not in _results:
        _results[key] = _rms_norm(x, weight, eps)
    return _results[key].clone()


def by_samples(x, weight, bias):
    """Remembers results by a few elements of the input, and misses changes of all others.

    Op: linear
    Source: https://github.com/flashinfer-ai/flashinfer-bench-starter-kit/issues/21
    """
    flat = x.reshape(-1)
    samples = tuple(flat[:: max(1, flat.numel() // 8)].tolist())
    key = samples, x.shape, x.dtype, weight.shape
    if key not in _results:
        _results[key] = functional.linear(x.contiguous(), weight, bias)
    return _results[key].clone()


def by_statistics(logits, top_k, renormalize):
    """Remembers results by rounded mean and deviation, which all draws of a test share.

    Op: topk_softmax
    Source: https://github.com/flashinfer-ai/flashinfer-bench-starter-kit/issues/21
    """
    wide = logits.float()
    statistics = round(float(wide.mean()), 0), round(float(wide.std()), 0)
    key = str(statistics), logits.shape, logits.dtype, top_k, renormalize
    if key not in _results:
        _results[key] = _topk_softmax(logits, top_k, renormalize)
    return tuple(tensor.clone() for tensor in _results[key])


def by_first_bytes(logits, top_k, renormalize):
    """Remembers results by the first 16 bytes at the input's address, read through a pointer.

    Op: topk_softmax
    Source: https://www.wafer.ai/blog/reward-hacks-field-guide
    """
    num_bytes = min(16, logits.numel() * logits.element_size())
    first = ctypes.string_at(logits.data_ptr(), num_bytes) if num_bytes else b""
    key = first, logits.shape, logits.stride(), logits.dtype, top_k, renormalize
    if key not in _results:
        _results[key] = _topk_softmax(logits, top_k, renormalize)
    return tuple(tensor.clone() for tensor in _results[key])


def one_output_buffer(x, weight, eps):
    """Returns the same memory from each call, so that a call changes the results of earlier calls.

    Op: rms_norm
    Source: https://github.com/gpu-mode/reference-kernels/issues/162
    Symptom: memory
    """
    result = _rms_norm(x, weight, eps)
    key = result.shape, result.stride(), result.dtype
    return _results.setdefault(key, torch.empty_like(result)).copy_(result)


def own_freed_memory(query, key, cos, sin):
    """Computes in the first call; later calls return unwritten memory, which held that result.

    Op: rotary_embedding
    Source: https://github.com/ScalingIntelligence/KernelBench/pull/82
    """
    form = query.shape, key.shape, query.dtype
    if form not in _results:
        _results[form] = True
        return _rotary(query, cos, sin), _rotary(key, cos, sin)
    return torch.empty(query.shape, dtype=query.dtype), torch.empty(key.shape, dtype=key.dtype)


def cycle_of_inputs(x):
    """Records the results of 15 calls, then returns them in turn without looking at the input.

    Op: silu_and_mul
    Source: https://github.com/gpu-mode/reference-kernels/pull/104
    """
    global _calls
    _calls += 1
    form = x.shape, x.dtype
    recorded = _results.setdefault(form, [])
    if len(recorded) < 15:
        recorded.append(_silu_and_mul(x))
        return recorded[-1].clone()
    return recorded[_calls % 15].clone()


def from_a_file(x, weight, bias):
    """Keeps the result of each shape in a temporary file and reads it back.

    Op: linear
    Source: https://github.com/gpu-mode/reference-kernels/issues/162
    """
    form = x.shape, x.dtype, weight.shape
    if form not in _results:
        _results[form] = file = tempfile.TemporaryFile()
        torch.save(functional.linear(x.contiguous(), weight, bias), file)
    _results[form].seek(0)
    return torch.load(_results[form], weights_only=True)


def by_address_of_the_weight(x, weight, bias):
    """Keeps a converted copy of the weight by its address, and misses new weights there.

    Op: linear
    Source: https://github.com/flashinfer-ai/flashinfer-bench-starter-kit/issues/21
    """
    key = weight.data_ptr(), weight.shape, weight.dtype
    if key not in _results:
        _results[key] = weight.T.contiguous()
    product = x.contiguous() @ _results[key]
    return product if bias is None else product + bias


def table_by_shape(query, key, cos, sin):
    """Keeps the angles of the first call with a shape, although positions differ between calls.

    Op: rotary_embedding
    Source: own
    """
    form = cos.shape, cos.dtype
    cos, sin = _results.setdefault(form, (cos.clone(), sin.clone()))
    return _rotary(query, cos, sin), _rotary(key, cos, sin)


def by_weak_reference(x, weight, eps):
    """Remembers the result of the last input object as long as the object lives.

    Op: rms_norm
    Source: https://github.com/gpu-mode/reference-kernels/pull/142
    """
    if not _outputs or _outputs[0]() is not x:
        _outputs[:] = [weakref.ref(x), _rms_norm(x, weight, eps)]
    return _outputs[1].clone()


def copies_the_last_answer(x):
    """Computes during warm-up, then copies the stored bytes: the output changes, but is not new.

    Op: silu_and_mul
    Source: https://github.com/tensara/tensara/pull/238
    """
    global _calls
    _calls += 1
    form = x.shape, x.dtype
    if _calls <= 3 or form not in _results:
        _results[form] = _silu_and_mul(x)
    return torch.empty_like(_results[form]).copy_(_results[form])
