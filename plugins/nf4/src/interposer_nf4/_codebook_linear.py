"""The op ``nf4_linear``: a linear layer with 4-bit weights that index a codebook.

Dimensions: I input features, O output features, G inputs per block.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer import Tolerance, custom_op
from interposer_nf4._cases import nf4_linear_cases, nf4_linear_sample


def dequantize(
    weight: torch.Tensor, absmax: torch.Tensor, codebook: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize weights to ``[O, I]``: codebook[index] * absmax.

    Args:
        weight: ``[O, I / 2]`` uint8, two indices per byte, the first input in the high nibble.
        absmax: ``[O, I / G]``, any float dtype.
        codebook: ``[16]``, any float dtype.
        dtype: of the multiplication and of the result.
    """
    indices = torch.stack((weight >> 4, weight & 15), -1).flatten(1).long()
    blocks = codebook.to(dtype)[indices].unflatten(1, (absmax.shape[1], -1))
    weights: torch.Tensor = (blocks * absmax.to(dtype).unsqueeze(-1)).flatten(1)
    return weights


# Two roundings: of the matmul before the bias is added, and of the result.
@custom_op(
    "nf4_linear",
    cases=nf4_linear_cases,
    constants=("weight", "absmax", "codebook", "bias"),
    tolerance=Tolerance(roundings=2),
    sample=nf4_linear_sample,
    batched=("x",),
)
def nf4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply ``x`` by a weight of 4-bit codebook indices, and add a bias.

    y = x (codebook[weight] * absmax)^T + bias; each absmax applies to G inputs of one output.
    Weights and sums are float32 or wider.

    The codebook determines the format. NF4 has quantiles of a normal distribution between -1 and
    1. FP4 has the values of a float with one sign bit, two exponent bits and one mantissa bit. G is
    usually 64.

    Args:
        x: ``[..., I]``, any float dtype.
        weight: ``[O, I / 2]`` uint8, two indices per byte, the first input in the high nibble.
        absmax: ``[O, I / G]`` float32; the shape determines G.
        codebook: ``[16]`` float32.
        bias: ``[O]``, dtype of ``x``, or None.
    Returns: ``[..., O]``, dtype of ``x``.
    Dims: ``in_features``, ``out_features``, ``biased``. Only the weight files state the block
        size, so it is not known when a kernel is selected.
    Source: QLoRA, arXiv:2305.14314, sections 2 and 3; order of nibbles: bitsandbytes 0.50.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dequantized = dequantize(weight, absmax, codebook, wide)
    offset = None if bias is None else bias.to(wide)
    return functional.linear(x.to(wide), dequantized, offset).to(x.dtype)
