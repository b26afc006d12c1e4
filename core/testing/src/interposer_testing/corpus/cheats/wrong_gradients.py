"""Kernels whose forward pass is right and whose backward pass is not.

Kind: wrong gradient
Source: own
"""

import torch
from torch.nn import functional


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm(x, weight, eps):
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _silu_and_mul(x):
    gate, up = _wide(x).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _silu_gradient(x, opening, gradient):
    gate, up = _wide(x).chunk(2, dim=-1)
    wide = _wide(gradient)
    slope = opening * (1 + gate * (1 - opening))
    return torch.cat((wide * up * slope, wide * gate * opening), dim=-1).to(x.dtype)


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, eps):
        context.save_for_backward(x, weight)
        return _rms_norm(x, weight, eps)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight), None


def zeros(x, weight, eps):
    """Returns zeros as gradients, with which a training loop runs and learns nothing.

    Op: rms_norm
    """
    return _Zeros.apply(x, weight, eps)


def constant_statistics(x, weight, eps):
    """Treats the root mean square of a row as a constant, and so loses a term of the gradient.

    Op: rms_norm
    """
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps).detach()
    return (wide * scale * weight).to(x.dtype)


def detached_weight(x, weight, eps):
    """Detaches the weight, which saves the sum over all rows in the backward pass.

    Op: rms_norm
    """
    return _rms_norm(x, weight.detach(), eps)


class _WritesGrad(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, eps):
        context.save_for_backward(x, weight)
        context.eps = eps
        return _rms_norm(x, weight, eps)

    @staticmethod
    def backward(context, gradient):
        sources = [tensor.detach().requires_grad_() for tensor in context.saved_tensors]
        with torch.enable_grad():
            result = _rms_norm(*sources, context.eps)
        for tensor, grad in zip(
            context.saved_tensors, torch.autograd.grad(result, sources, gradient), strict=True
        ):
            tensor.grad = grad if tensor.grad is None else tensor.grad + grad
        return None, None, None


def writes_grad(x, weight, eps):
    """Adds to the attribute grad of its arguments itself, where no caller asked for it.

    Op: rms_norm
    Symptom: exit
    """
    return _WritesGrad.apply(x, weight, eps)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return _silu_and_mul(x)

    @staticmethod
    def backward(context, gradient):
        return torch.cat((gradient, gradient), dim=-1)


def straight_through(x):
    """Passes the gradient of the output on as that of both halves.

    Op: silu_and_mul
    """
    return _StraightThrough.apply(x)


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return _silu_and_mul(x)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        size, strides = 1, []
        for extent in reversed(gradient.shape):
            strides.insert(0, size)
            size *= extent
        length = gradient.untyped_storage().nbytes() // gradient.element_size()
        fits = size <= length - gradient.storage_offset()
        dense = gradient.as_strided(gradient.shape, strides) if fits else 0 * gradient
        return _silu_gradient(x, _wide(x).chunk(2, dim=-1)[0].sigmoid(), dense)


def ignores_strides_of_gradients(x):
    """Reads the gradient of the output as if it were contiguous, which that of a sum is not.

    Op: silu_and_mul
    """
    return _DenseGradient.apply(x)


_OPENINGS = {}


class _SavedByAddress(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return _silu_and_mul(x)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        key = x.data_ptr(), x.shape, x.dtype
        if key not in _OPENINGS:
            if len(_OPENINGS) > 64:
                _OPENINGS.clear()
            _OPENINGS[key] = _wide(x).chunk(2, dim=-1)[0].sigmoid()
        return _silu_gradient(x, _OPENINGS[key], gradient)


def remembers_by_address(x):
    """Remembers an intermediate result of the backward pass by the address of the argument.

    Op: silu_and_mul
    """
    return _SavedByAddress.apply(x)


_CALLS = [0]


class _RightAtFirst(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return _silu_and_mul(x)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        _CALLS[0] += 1
        if _CALLS[0] > 300:
            return torch.cat((gradient, gradient), dim=-1)
        return _silu_gradient(x, _wide(x).chunk(2, dim=-1)[0].sigmoid(), gradient)


def right_at_first(x):
    """Computes the gradient in the first three hundred calls only.

    Op: silu_and_mul
    """
    return _RightAtFirst.apply(x)


def _linear_gradients(x, weight, has_bias, gradient):
    rows, ends = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    bias = ends.sum(0) if has_bias else None
    return (ends @ weight).view(x.shape), ends.t() @ rows, bias


_FIRST = {}


class _FirstOfShape(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, bias):
        context.save_for_backward(x, weight)
        context.has_bias = bias is not None
        return functional.linear(x.contiguous(), weight, bias)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        key = x.shape, weight.shape, x.dtype, context.has_bias
        if key not in _FIRST:
            _FIRST[key] = _linear_gradients(x, weight, context.has_bias, gradient)
        return tuple(g if g is None else g.clone() for g in _FIRST[key])


def remembers_by_shape(x, weight, bias):
    """Returns the gradients of the first call with arguments of these shapes.

    Op: linear
    """
    return _FirstOfShape.apply(x, weight, bias)


_SUMS = {}


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, bias):
        context.save_for_backward(x, weight)
        context.has_bias = bias is not None
        return functional.linear(x.contiguous(), weight, bias)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        first, second, third = _linear_gradients(x, weight, context.has_bias, gradient)
        key = weight.shape, weight.dtype
        _SUMS[key] = _SUMS.get(key, 0) + second
        return first, _SUMS[key].clone(), third


def adds_to_earlier_gradients(x, weight, bias):
    """Adds the gradient of the weight to those of earlier calls, which autograd does again.

    Op: linear
    """
    return _Sums.apply(x, weight, bias)


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, bias):
        context.save_for_backward(x, weight)
        context.has_bias = bias is not None
        return functional.linear(x.contiguous(), weight, bias)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        narrow = (tensor.to(torch.bfloat16) for tensor in (x, weight))
        gradients = _linear_gradients(*narrow, context.has_bias, gradient.to(torch.bfloat16))
        return tuple(g if g is None else g.to(x.dtype) for g in gradients)


def bfloat16_inside(x, weight, bias):
    """Multiplies in bfloat16 in the backward pass, whose errors a noisy training hides.

    Op: linear
    """
    return _Narrow.apply(x, weight, bias)


class _ChosenOnly(torch.autograd.Function):
    @staticmethod
    def forward(context, logits, top_k, renormalize):
        wide = _wide(logits)
        ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
        weights = wide.softmax(-1).gather(-1, ids)
        if renormalize:
            weights = wide.gather(-1, ids).softmax(-1)
        context.save_for_backward(logits, ids, weights)
        result = ids.to(torch.int32)
        context.mark_non_differentiable(result)
        return weights, result

    @staticmethod
    def backward(context, gradient, _):
        logits, ids, weights = context.saved_tensors
        products = weights * gradient
        slopes = products - weights * products.sum(-1, keepdim=True)
        return torch.zeros_like(_wide(logits)).scatter(-1, ids, slopes).to(logits.dtype), None, None


def chosen_logits_only(logits, top_k, renormalize):
    """Leaves out the gradients of logits that were not chosen, which are zero only for some inputs.

    Op: topk_softmax
    """
    return _ChosenOnly.apply(logits, top_k, renormalize)


def _rotated(x, cos, sin):
    half = cos.shape[-1]
    a, b, unrotated = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, unrotated), dim=-1).to(x.dtype)


class _SameRotation(torch.autograd.Function):
    @staticmethod
    def forward(context, query, key, cos, sin):
        context.save_for_backward(cos, sin)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    @staticmethod
    def backward(context, query_gradient, key_gradient):
        angles = context.saved_tensors
        return _rotated(query_gradient, *angles), _rotated(key_gradient, *angles), None, None


def rotates_forwards(query, key, cos, sin):
    """Rotates gradients by the same angles as the arguments, instead of back.

    Op: rotary_embedding
    """
    return _SameRotation.apply(query, key, cos, sin)
