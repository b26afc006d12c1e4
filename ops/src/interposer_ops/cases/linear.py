"""Cases of dense projections and table lookup. I input features, O output features."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from interposer import Case
from interposer.op import Dims
from interposer_ops.cases.magnitude import longest_row, peak
from interposer_ops.cases.numbers import normal_numbers

__all__ = ["embedding_cases", "embedding_sample", "linear_cases", "linear_sample"]

# Shape of x without its last dimension, I, O.
_SHAPES = {
    "one row": ((1,), 64, 96),
    "few rows": ((4,), 128, 64),
    "many rows": ((33,), 128, 96),
    "odd sizes": ((5,), 127, 65),
    "one element": ((1,), 1, 1),
    "no rows": ((0,), 64, 32),
    "three dimensions": ((2, 3), 64, 48),
    "long sum": ((3,), 2048, 16),
    "many weights": ((3,), 640, 448),
}


def linear_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield several shapes, each with and without a bias, and inputs cut out of wider rows."""
    generator = torch.Generator().manual_seed(seed)
    for with_bias in (False, True):
        for label, (rows, in_features, out_features) in _SHAPES.items():
            x = torch.randn(*rows, in_features, generator=generator)
            yield _linear(label, x.to(dtype), out_features, with_bias, generator)
        wide = torch.randn(6, 192, generator=generator).to(dtype)
        yield _linear("strided rows", wide[:, 32:160], 48, with_bias, generator)
        yield _linear("every second row", wide[::2], 48, with_bias, generator)


def _linear(
    label: str, x: torch.Tensor, out_features: int, with_bias: bool, generator: torch.Generator
) -> Case:
    in_features = x.shape[-1]
    scaled = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    weight = scaled.to(x.dtype)
    bias = torch.randn(out_features, generator=generator).to(x.dtype) if with_bias else None
    terms = x.abs().double() @ weight.abs().double().T
    return Case(
        f"{label}, bias" if with_bias else label,
        {"x": x, "weight": weight, "bias": bias},
        {"in_features": in_features, "out_features": out_features},
        reduction=in_features + with_bias,
        magnitude=peak(terms) + (peak(bias) if bias is not None else 0.0),
        # The product may be stored before the bias is added to it.
        rounded=peak(x.double() @ weight.double().T) if with_bias else 0.0,
    )


def linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states and a weight without bias, which the dims do not tell."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    shape = (out_features, in_features)
    weight = normal_numbers(shape, dtype, generator, deviation=in_features**-0.5)
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    return Case(
        f"{num_tokens} tokens",
        {"x": x, "weight": weight, "bias": None},
        dims,
        reduction=in_features,
        magnitude=longest_row(x) * longest_row(weight),
    )


def embedding_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield one, many, repeated and no tokens; rows of the table that nobody reads are NaN."""
    generator = torch.Generator().manual_seed(seed)
    many = torch.randint(0, 200, (65,), generator=generator)
    yield _embedding("one token", torch.tensor([3]), 16, 64, dtype, generator)
    yield _embedding("many tokens", many, 200, 128, dtype, generator)
    yield _embedding("odd width", torch.tensor([5, 0, 6, 2]), 7, 33, dtype, generator)
    yield _embedding("first and last row", torch.tensor([0, 30]), 31, 64, dtype, generator)
    yield _embedding("one token repeated", torch.full((9,), 2), 5, 64, dtype, generator)
    yield _embedding("one row", torch.zeros(2, dtype=torch.int64), 1, 1, dtype, generator)
    yield _embedding("no tokens", many[:0], 16, 64, dtype, generator)
    yield _embedding("strided tokens", many[::3], 200, 64, dtype, generator)


def _embedding(
    label: str,
    token_ids: torch.Tensor,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Case:
    weight = torch.full((vocab_size, hidden_size), torch.nan, dtype=dtype)
    read = token_ids.unique()
    weight[read] = torch.randn(len(read), hidden_size, generator=generator).to(dtype)
    dims = {"vocab_size": vocab_size, "hidden_size": hidden_size}
    return Case(label, {"token_ids": token_ids, "weight": weight}, dims, reduction=0)


def embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T tokens from anywhere in the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size, hidden_size = int(dims["vocab_size"]), int(dims["hidden_size"])
    weight = normal_numbers((vocab_size, hidden_size), dtype, generator)
    token_ids = torch.randint(vocab_size, (num_tokens,), generator=generator)
    arguments = {"token_ids": token_ids, "weight": weight}
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)
