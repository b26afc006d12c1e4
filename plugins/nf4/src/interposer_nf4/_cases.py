"""Test cases of ``nf4_linear``. I input, O output features, G inputs per block."""

from __future__ import annotations

from math import gcd

import torch

from interposer import Case, Dims
from interposer_nf4._codebooks import CODEBOOKS, QuantType
from interposer_ops.cases import bias_of, linear_case, normal_numbers, sampled_case
from interposer_testing.cases import Axis, CaseSpace, Point, normal, uniform

# Label: (shape of x, O, G).
_SHAPES = {
    "blocks of 64": ((7, 128), 40, 64),
    "blocks of 32, odd sizes": ((5, 96), 37, 32),
    "blocks of 4096, one row": ((1, 4096), 24, 4096),
    "one input pair": ((2, 2), 1, 2),
    "a row and a column after 128": ((129, 64), 129, 64),
    "no rows": ((0, 64), 16, 64),
    "three dimensions": ((2, 3, 96), 32, 16),
    "long sum": ((3, 4096), 72, 64),
    "blocks that end inside a byte": ((3, 90), 11, 15),
    "blocks of 1": ((3, 16), 8, 1),
}
_BLOCK = 64
# Root mean square of the codebook values if all codes are equally likely.
_DEVIATION = 0.5


def _build(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, out_features, group_size = point["shape"]
    in_features = shape[-1]
    weight = _bytes((out_features, in_features // 2), generator)
    absmax = _absmax((out_features, in_features // group_size), in_features, generator)
    # Every other output has scales of zero.
    if point["absmax"] == "zeros":
        absmax[::2] = 0
    codebook = _codebook(point["codebook"], generator)
    x = normal(shape, dtype, generator)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {"x": x, "weight": weight, "absmax": absmax, "codebook": codebook, "bias": bias}
    dims = {"in_features": in_features, "out_features": out_features}
    dequantized = _dequantized(weight, absmax, codebook)
    return linear_case(arguments, dims, x.double(), dequantized, bias, 1, stored_product=True)


nf4_linear_cases = CaseSpace(
    _build,
    Axis("shape", _SHAPES),
    Axis("codebook", {"": "nf4", "fp4": "fp4", "any codebook": None}),
    Axis("absmax", {"": "", "blocks of zeros": "zeros"}),
    Axis("bias", {"": False, "bias": True}),
    strided={
        "x": "leading",
        "weight": "offset",
        "absmax": "offset",
        "codebook": "offset",
        "bias": "offset",
    },
    crossed={
        "shape": ("blocks of 64", "blocks of 32, odd sizes", "three dimensions"),
        "codebook": ("",),
        "absmax": ("",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
)
"""Block sizes, published and random codebooks, blocks of zeros, with and without bias."""


def nf4_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return a case with T rows of hidden states and an NF4 weight in blocks of 64.

    If 64 does not divide the inputs, the block size is the greatest common divisor of both.
    """
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    weight = _bytes((out_features, in_features // 2), generator)
    grouped = (out_features, in_features // gcd(in_features, _BLOCK))
    absmax = _absmax(grouped, in_features, generator)
    codebook = _codebook("nf4", generator)
    bias = bias_of(out_features, dtype, generator, bool(dims.get("biased")))
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    arguments = {"x": x, "weight": weight, "absmax": absmax, "codebook": codebook, "bias": bias}
    dequantized = _dequantized(weight, absmax, codebook)
    return sampled_case(arguments, dims, x, dequantized, 1, stored_product=True)


def _bytes(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _absmax(shape: tuple[int, int], in_features: int, generator: torch.Generator) -> torch.Tensor:
    """Return scales that differ by up to four times and keep outputs around 1."""
    size = 1 / (_DEVIATION * in_features**0.5)
    return uniform(shape, torch.float32, generator, 0.5 * size, 2.0 * size)


def _codebook(name: QuantType | None, generator: torch.Generator) -> torch.Tensor:
    """Return a published codebook, or random values if no name is given."""
    if name is None:
        return uniform((16,), torch.float32, generator)
    return torch.tensor(CODEBOOKS[name])


def _dequantized(
    weight: torch.Tensor, absmax: torch.Tensor, codebook: torch.Tensor
) -> torch.Tensor:
    """Return the dequantized weights ``[O, I]`` in float64."""
    quantized = torch.stack((weight // 16, weight % 16), -1).flatten(1).int()
    values = codebook.double()[quantized]
    inputs_per_block = values.shape[1] // absmax.shape[1]
    return values * absmax.double().repeat_interleave(inputs_per_block, 1)
