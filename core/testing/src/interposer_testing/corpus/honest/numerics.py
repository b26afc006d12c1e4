"""Honest kernels with other roundings and other orders of summation, within the error bound.

Kind: numerics
Source: own
"""

import math

import torch
from torch.nn import functional


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def float64_inside(x):
    """Computes in float64 and rounds once.

    Op: silu_and_mul
    """
    gate, up = x.double().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def sigmoid_product(x):
    """Multiplies by the sigmoid instead of calling silu.

    Op: silu_and_mul
    """
    gate, up = _wide(x).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def division_by_one_plus_exp(x):
    """Divides by 1 + exp(-g), with an overflow that yields the right zero.

    Op: silu_and_mul
    """
    gate, up = _wide(x).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def tanh_form(x):
    """Computes the sigmoid in float64 by the hyperbolic tangent for small gates.

    Op: silu_and_mul
    """
    gate, up = x.double().chunk(2, dim=-1)
    by_tanh = 0.5 * (1 + torch.tanh(gate / 2))
    sigmoid = torch.where(gate.abs() < 1, by_tanh, torch.sigmoid(gate))
    return (gate * sigmoid * up).to(x.dtype)


def rows_in_chunks(x):
    """Computes a few rows at a time.

    Op: silu_and_mul
    """
    rows = x.reshape(-1, x.shape[-1])
    result = torch.empty((rows.shape[0], x.shape[-1] // 2), dtype=x.dtype)
    for start in range(0, rows.shape[0], 7):
        gate, up = _wide(rows[start : start + 7]).chunk(2, dim=-1)
        result[start : start + 7] = functional.silu(gate) * up
    return result.view(*x.shape[:-1], result.shape[-1])


def columns_in_chunks(x):
    """Computes a few columns at a time, and an odd rest.

    Op: silu_and_mul
    """
    width = x.shape[-1] // 2
    gate, up = _wide(x).split(width, dim=-1)
    parts = zip(gate.split(16, dim=-1), up.split(16, dim=-1), strict=True)
    return torch.cat([functional.silu(g) * u for g, u in parts], dim=-1).to(x.dtype)


def vector_norm(x, weight, eps):
    """Takes the root mean square from the vector norm.

    Op: rms_norm
    """
    wide = x.double()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(norm.square() / x.shape[-1] + eps)
    return (wide * scale * weight).to(x.dtype)


def sum_of_squares_by_matmul(x, weight, eps):
    """Sums squares by a product of matrices with a vector of ones.

    Op: rms_norm
    """
    wide = x.double()
    ones = torch.full((x.shape[-1], 1), 1 / x.shape[-1], dtype=torch.float64)
    return (wide * torch.rsqrt(wide.square() @ ones + eps) * weight).to(x.dtype)


def pairwise_sum(x, weight, eps):
    """Sums squares pairwise, in an order of its own.

    Op: rms_norm
    """
    wide = _wide(x)
    sums = wide.square()
    while sums.shape[-1] > 1:
        sums = functional.pad(sums, (0, sums.shape[-1] % 2))
        sums = sums[..., ::2] + sums[..., 1::2]
    return (wide * torch.rsqrt(sums / x.shape[-1] + eps) * weight).to(x.dtype)


def compensated_sum(x, weight, eps):
    """Sums squares by Kahan's compensated summation over blocks of columns.

    Op: rms_norm
    """
    wide = x.double()
    total, lost = torch.zeros(*x.shape[:-1], 1, dtype=torch.float64), 0.0
    for block in wide.square().split(32, dim=-1):
        term = block.sum(-1, keepdim=True) - lost
        larger = total + term
        lost, total = ((larger - total) - term).nan_to_num(), larger  # infinity minus infinity
    return (wide * torch.rsqrt(total / x.shape[-1] + eps) * weight).to(x.dtype)


def division_by_the_root(x, weight, eps):
    """Divides by the square root instead of multiplying by its reciprocal.

    Op: rms_norm
    """
    wide = _wide(x)
    root = torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide / root * weight).to(x.dtype)


def weight_first(x, weight, eps):
    """Multiplies by the weight before the scale, in float64.

    Op: rms_norm
    """
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.double() * scale).to(x.dtype)


def float64_product(x, weight, bias):
    """Multiplies in float64 and rounds once.

    Op: linear
    """
    product = functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    return product.to(x.dtype)


def split_k(x, weight, bias):
    """Splits the sum over input features into parts, and adds the parts in float32 or wider.

    Op: linear
    """
    wide, rows = torch.promote_types(x.dtype, torch.float32), x.reshape(-1, x.shape[-1])
    result = torch.zeros((rows.shape[0], weight.shape[0]), dtype=torch.float64)
    for start in range(0, x.shape[-1], 24):
        part = slice(start, start + 24)
        result += rows[:, part].to(wide) @ weight[:, part].to(wide).T
    result = result if bias is None else result + bias
    return result.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def column_by_column(x, weight, bias):
    """Computes one output feature at a time, as a loop of matrix-vector products.

    Op: linear
    """
    wide = _wide(x.reshape(-1, x.shape[-1]))
    columns = [wide @ row for row in _wide(weight)]
    result = torch.stack(columns, dim=-1)
    result = result if bias is None else result + bias
    return result.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def einsum(x, weight, bias):
    """Writes the product as an Einstein sum.

    Op: linear
    """
    result = torch.einsum("...i,oi->...o", _wide(x), _wide(weight))
    result = result if bias is None else result + bias
    return result.to(x.dtype).contiguous()


def logarithmic_softmax(logits, top_k, renormalize):
    """Takes the weights as exponentials of the logarithmic softmax.

    Op: topk_softmax
    """
    wide = _wide(logits)
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    weights = wide.double().log_softmax(-1).exp().gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights.to(wide.dtype), ids.to(torch.int32)


def sorts_negated(logits, top_k, renormalize):
    """Sorts negated logits in ascending order, where a stable sort also keeps the lowest id first.

    Op: topk_softmax
    """
    wide = _wide(logits)
    ids = (-wide).sort(dim=-1, stable=True).indices[..., :top_k].contiguous()
    weights = wide.softmax(-1).gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, ids.to(torch.int32)


def one_maximum_at_a_time(logits, top_k, renormalize):
    """Takes the largest logit K times, and excludes each before the next.

    Op: topk_softmax
    """
    wide = _wide(logits)
    ids = []
    columns = torch.arange(logits.shape[-1])
    is_free = torch.ones_like(wide, dtype=torch.bool)
    for _ in range(top_k):
        best = wide.masked_fill(~is_free, -math.inf).amax(-1, keepdim=True)
        is_best = (wide == best) & is_free
        first = torch.where(is_best, columns, logits.shape[-1]).amin(-1, keepdim=True)
        ids.append(first)
        is_free &= columns != first
    ids = torch.cat(ids, dim=-1)
    weights = wide.softmax(-1).gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, ids.to(torch.int32)


def complex_rotation(query, key, cos, sin):
    """Rotates halves as complex numbers.

    Op: rotary_embedding
    """
    half = cos.shape[-1]
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(-2)

    def rotated(x):
        a, b, tail = x.double().tensor_split((half, 2 * half), dim=-1)
        z = torch.complex(a.contiguous(), b.contiguous()) * turn
        return torch.cat((z.real, z.imag, tail), dim=-1).to(x.dtype)

    return rotated(query), rotated(key)


def half_turn_form(query, key, cos, sin):
    """Adds the product of the swapped halves, as models of transformers do.

    Op: rotary_embedding
    """
    cos, sin = (torch.cat((t, t), dim=-1).unsqueeze(-2) for t in (cos, sin))
    size = cos.shape[-1]

    def rotated(x):
        head, tail = x[..., :size].to(cos.dtype), x[..., size:].to(cos.dtype)
        a, b = head.chunk(2, dim=-1)
        turned = head * cos + torch.cat((-b, a), dim=-1) * sin
        return torch.cat((turned, tail), dim=-1).to(x.dtype)

    return rotated(query), rotated(key)


def head_by_head(query, key, cos, sin):
    """Rotates one head at a time into an allocated output.

    Op: rotary_embedding
    """
    half = cos.shape[-1]

    def rotated(x):
        result = torch.empty(x.shape, dtype=x.dtype)
        for head in range(x.shape[1]):
            a, b, tail = x[:, head].to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
            result[:, head, :half] = a * cos - b * sin
            result[:, head, half : 2 * half] = b * cos + a * sin
            result[:, head, 2 * half :] = tail
        return result

    return rotated(query), rotated(key)
