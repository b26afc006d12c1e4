"""Cases of the quantized linears. I input features, O output features, G inputs per scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from interposer import Case
from interposer.op import Dims
from interposer_ops.cases.magnitude import longest_row
from interposer_ops.cases.numbers import normal_numbers

__all__ = ["w8a16_linear_cases", "w8a16_linear_sample"]

# Shape of x, O and G.
_SHAPES = {
    "one row": ((1, 64), 48, 64),
    "many rows": ((33, 256), 64, 256),
    "odd sizes": ((5, 127), 37, 127),
    "one input, one output": ((2, 1), 1, 1),
    "no rows": ((0, 64), 16, 64),
    "three dimensions": ((2, 3, 96), 32, 96),
    "wide": ((2, 4096), 24, 4096),
    "groups of 32": ((7, 128), 40, 32),
    "groups of 128, one row": ((1, 1024), 64, 128),
    "odd groups": ((3, 75), 11, 15),
    "groups of 1": ((3, 16), 8, 1),
}


def w8a16_linear_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield both granularities of scales, with and without bias, and the ends of int8."""
    generator = torch.Generator().manual_seed(seed)
    for number, (label, (shape, out_features, group_size)) in enumerate(_SHAPES.items()):
        x = torch.randn(shape, generator=generator)
        weight = _weight(out_features, shape[-1], generator)
        scale = _scale(weight, group_size, generator)
        yield _case(label, x.to(dtype), weight, scale, generator, bias=number % 2 == 0)
    x = torch.randn(4, 64, generator=generator).to(dtype)
    ends = torch.tensor([-128, 127], dtype=torch.int8).repeat(16, 32)
    yield _case("ends of int8", x, ends, _scale(ends, 32, generator), generator)
    weight = _weight(16, 64, generator)
    scale = _scale(weight, 16, generator)
    scale[::2] = 0
    yield _case("scales of zero", x, weight, scale, generator, bias=True)
    strided = torch.randn(4, 192, generator=generator)[:, 32:96].to(dtype)
    yield _case("strided rows", strided, weight, _scale(weight, 32, generator), generator)


def w8a16_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states and a weight without bias, which the dims do not tell."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    weight = _weight(out_features, in_features, generator)
    scale = _scale(weight, int(dims["group_size"]), generator)
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    # The length of each group, scaled; those of one output make up its length.
    grouped = weight.unflatten(1, (scale.shape[1], -1)).float()
    lengths = torch.linalg.vector_norm(grouped, dim=-1) * scale
    return Case(
        f"{num_tokens} tokens",
        {"x": x, "weight": weight, "scale": scale, "bias": None},
        dims,
        reduction=in_features + 1,
        magnitude=longest_row(x) * longest_row(lengths),
    )


def _weight(out_features: int, in_features: int, generator: torch.Generator) -> torch.Tensor:
    shape = (out_features, in_features)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def _scale(weight: torch.Tensor, group_size: int, generator: torch.Generator) -> torch.Tensor:
    """Return scales that differ by up to four times and keep outputs around one."""
    out_features, in_features = weight.shape
    shape = (out_features, in_features // group_size)
    # 74 is the standard deviation of int8 that are all equally likely.
    return torch.empty(shape).uniform_(0.5, 2.0, generator=generator) / (
        74 * math.sqrt(in_features)
    )


def _case(
    label: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    generator: torch.Generator,
    *,
    bias: bool = False,
) -> Case:
    out_features, in_features = weight.shape
    num_groups = scale.shape[1]
    group_size = in_features // num_groups
    offset = torch.randn(out_features, generator=generator).to(x.dtype) if bias else None
    terms = weight.double().abs() * scale.double().repeat_interleave(group_size, 1)
    sums = x.double().abs() @ terms.T + (0 if offset is None else offset.double().abs())
    return Case(
        label,
        {"x": x, "weight": weight, "scale": scale, "bias": offset},
        {
            "in_features": in_features,
            "out_features": out_features,
            "group_size": group_size,
            "num_groups": num_groups,
        },
        # One more than there are terms, for the rounding of the dequantized weight.
        reduction=in_features + 1,
        magnitude=float(sums.max()) if sums.numel() else 0.0,
    )
