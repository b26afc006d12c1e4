"""Honest kernels that use other libraries, or unusual parts of torch.

Kind: libraries
Source: own
"""

import array
import ctypes
import math

import torch
from torch.nn import functional
from torch.utils import dlpack


def _silu_and_mul(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _topk_weights(wide, ids, renormalize):
    weights = wide.softmax(-1).gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, ids.to(torch.int32)


def numpy_arrays(x):
    """Computes in NumPy, imported in the first call.

    Op: silu_and_mul
    Needs: numpy
    """
    import numpy as np

    wide = x.double().numpy()
    gate, up = np.split(wide, 2, axis=-1)
    with np.errstate(over="ignore"):
        return torch.from_numpy(gate / (1 + np.exp(-gate)) * up).to(x.dtype)


def numpy_matmul(x, weight, bias):
    """Multiplies in NumPy, in float64.

    Op: linear
    Needs: numpy
    """
    result = torch.from_numpy(x.double().numpy() @ weight.double().numpy().T)
    return (result if bias is None else result + bias).to(x.dtype)


def numpy_sort(logits, top_k, renormalize):
    """Chooses the experts by NumPy's stable sort.

    Op: topk_softmax
    Needs: numpy
    """
    import numpy as np

    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    order = np.argsort(-wide.numpy(), axis=-1, kind="stable")[..., :top_k]
    return _topk_weights(wide, torch.from_numpy(np.ascontiguousarray(order)), renormalize)


def math_library(x):
    """Calls exp of the C library, an element at a time.

    Op: silu_and_mul
    """
    library = ctypes.CDLL(None)
    library.exp.restype, library.exp.argtypes = ctypes.c_double, [ctypes.c_double]
    gate, up = x.double().chunk(2, dim=-1)
    powers = [library.exp(-value) for value in gate.flatten().tolist()]
    power = torch.tensor(powers, dtype=torch.float64).view(gate.shape)
    return (gate / (1 + power) * up).to(x.dtype)


def python_floats(x, weight, eps):
    """Sums the squares of rows in Python floats, by math.fsum.

    Op: rms_norm
    """
    rows = x.double().reshape(-1, x.shape[-1]).tolist()
    means = [math.fsum(value * value for value in row) / x.shape[-1] for row in rows]
    scale = torch.tensor(means, dtype=torch.float64).view(*x.shape[:-1], 1)
    return (x.double() * torch.rsqrt(scale + eps) * weight).to(x.dtype)


def typed_array(query, key, cos, sin):
    """Passes the angles through arrays of the standard library.

    Op: rotary_embedding
    """

    def copied(table):
        content = array.array("d", table.double().flatten().tolist())
        return torch.tensor(content, dtype=torch.float64).view(table.shape).unsqueeze(-2)

    half = cos.shape[-1]
    c, s = copied(cos), copied(sin)

    def rotated(x):
        a, b, tail = x.double().tensor_split((half, 2 * half), dim=-1)
        return torch.cat((a * c - b * s, b * c + a * s, tail), dim=-1).to(x.dtype)

    return rotated(query), rotated(key)


def raw_pointers(x):
    """Copies the input through its pointer, as a foreign function does, and returns a new tensor.

    Op: silu_and_mul
    """
    dense = x.contiguous()
    copy = torch.empty(dense.shape, dtype=x.dtype)
    ctypes.memmove(copy.data_ptr(), dense.data_ptr(), dense.numel() * dense.element_size())
    return _silu_and_mul(copy)


def dlpack_round_trip(x, weight, eps):
    """Passes input and result through DLPack capsules.

    Op: rms_norm
    """
    x = dlpack.from_dlpack(dlpack.to_dlpack(x))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    result = (wide * scale * weight).to(x.dtype)
    return dlpack.from_dlpack(dlpack.to_dlpack(result))


def vectorized_map(x, weight, eps):
    """Maps a function of one row over all rows by torch.vmap.

    Op: rms_norm
    """

    def row(values):
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean() + eps) * weight).to(values.dtype)

    rows = x.reshape(-1, x.shape[-1])
    if not rows.shape[0]:
        return torch.empty_like(x)
    return torch.vmap(row)(rows).reshape(x.shape)


class _Named(torch.Tensor):
    pass


def subclass_inside(x):
    """Computes with a subclass of Tensor, and returns a plain tensor.

    Op: silu_and_mul
    """
    return _silu_and_mul(x.as_subclass(_Named)).as_subclass(torch.Tensor)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return _silu_and_mul(x)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        with torch.enable_grad():
            source = x.detach().requires_grad_()
            return torch.autograd.grad(_silu_and_mul(source), source, gradient)[0]


def autograd_function(x):
    """Computes in an autograd function with a backward pass of its own.

    Op: silu_and_mul
    """
    return _SiluAndMul.apply(x)


class _Norm(torch.nn.Module):
    def __init__(self, size, dtype, eps):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def module_with_parameters(x, weight, eps):
    """Builds a module in each call and loads the weight into it.

    Op: rms_norm
    """
    norm = _Norm(x.shape[-1], weight.dtype, eps)
    norm.load_state_dict({"weight": weight})
    return norm(x).detach()


def library_product(x, weight, bias):
    """Calls addmm or mm of torch, as a wrapper of a vendor's library does.

    Op: linear
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    result = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    return result.view(*x.shape[:-1], weight.shape[0])


def matrix_of_one_batch(x, weight, bias):
    """Multiplies as a batch of one.

    Op: linear
    """
    rows = x.reshape(1, -1, x.shape[-1]).contiguous()
    result = torch.bmm(rows, weight.t().unsqueeze(0))[0]
    result = result if bias is None else result + bias
    return result.view(*x.shape[:-1], weight.shape[0])
