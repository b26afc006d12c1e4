"""Kernels with a backward pass of an unusual kind.

Kind: gradient
Source: own
"""

import functools

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _SavesStatistics(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, eps):
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        context.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(context, gradient):
        x, weight, scale = context.saved_tensors
        unit, wide = _wide(x) * scale, _wide(gradient)
        inner = wide * weight
        mean = (inner * unit).mean(-1, keepdim=True)
        weight_gradient = (wide * unit).flatten(0, -2).sum(0)
        return (scale * (inner - unit * mean)).to(x.dtype), weight_gradient.to(weight.dtype), None


def saves_statistics(x, weight, eps):
    """Saves one number of each row for the backward pass, and computes all gradients by hand.

    Op: rms_norm
    """
    return _SavesStatistics.apply(x, weight, eps)


class _OwnFormula(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        gate, up = _wide(x).chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(x.dtype)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        gate, up = _wide(x).chunk(2, dim=-1)
        wide, opening = _wide(gradient), gate.sigmoid()
        result = torch.empty(x.shape, dtype=x.dtype)
        half = x.shape[-1] // 2
        result[..., :half] = wide * up * opening * (1 + gate * (1 - opening))
        result[..., half:] = wide * gate * opening
        return result


def own_formula(x):
    """Computes the slope of the gate by a formula, and writes both halves to one new buffer.

    Op: silu_and_mul
    """
    return _OwnFormula.apply(x)


def rounds_each_step(x):
    """Composes operators of torch, which round to the storage dtype in both passes.

    Op: silu_and_mul
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _norm(x, weight, eps):
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def recomputes(x, weight, eps):
    """Saves nothing but the arguments, and computes the forward pass again in the backward pass.

    Op: rms_norm
    """
    return checkpoint(_norm, x, weight, eps, use_reentrant=False, preserve_rng_state=False)


@torch.library.custom_op("corpus_gradients::linear", mutates_args=())
def _registered(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x.contiguous(), weight, bias)


def _keep(ctx, inputs, output):  # torch passes these by name
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _backward(context, gradient):
    x, weight = context.saved_tensors
    rows, ends = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    bias = ends.sum(0) if context.has_bias else None
    return (ends @ weight).view(x.shape), ends.t() @ rows, bias


_registered.register_autograd(_backward, setup_context=_keep)


def registered_backward(x, weight, bias):
    """Registers the backward pass of an operator with torch.

    Op: linear
    """
    return _registered(x, weight, bias)


class _Probabilities(torch.autograd.Function):
    @staticmethod
    def forward(context, logits, top_k, renormalize):
        wide = _wide(logits)
        ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
        weights = wide.softmax(-1).gather(-1, ids)
        if renormalize:
            weights = wide.gather(-1, ids).softmax(-1)
        context.save_for_backward(logits, ids, weights)
        context.renormalize = renormalize
        result = ids.to(torch.int32)
        context.mark_non_differentiable(result)
        return weights, result

    @staticmethod
    def backward(context, gradient, _):
        logits, ids, weights = context.saved_tensors
        products = weights * gradient
        mean = products.sum(-1, keepdim=True)
        if context.renormalize:
            slopes = torch.zeros_like(_wide(logits)).scatter(-1, ids, products - weights * mean)
        else:
            spread = torch.zeros_like(_wide(logits)).scatter(-1, ids, products)
            slopes = spread - _wide(logits).softmax(-1) * mean
        return slopes.to(logits.dtype), None, None


def saves_probabilities(logits, top_k, renormalize):
    """Computes the gradient from the probabilities that the forward pass returned.

    Op: topk_softmax
    """
    return _Probabilities.apply(logits, top_k, renormalize)


def _rotated(x, cos, sin):
    half = cos.shape[-1]
    a, b, unrotated = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, unrotated), dim=-1).to(x.dtype)


class _RotatesBack(torch.autograd.Function):
    @staticmethod
    def forward(context, query, key, cos, sin):
        context.save_for_backward(cos, sin)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    @staticmethod
    def backward(context, query_gradient, key_gradient):
        cos, sin = context.saved_tensors
        return _rotated(query_gradient, cos, -sin), _rotated(key_gradient, cos, -sin), None, None


def rotates_back(query, key, cos, sin):
    """Uses the kernel itself as its backward pass, with negative angles.

    Op: rotary_embedding
    """
    return _RotatesBack.apply(query, key, cos, sin)


@functools.cache
def _compiled():
    def forward(query, key, cos, sin):
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    return torch.compile(forward, dynamic=True)


def compiled_backward(query, key, cos, sin):
    """Leaves both passes to the compiler of torch.

    Op: rotary_embedding
    Needs: compiler
    """
    return _compiled()(query, key, cos, sin)
