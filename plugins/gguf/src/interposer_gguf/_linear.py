"""The op ``gguf_linear``: a linear layer with weights in GGUF blocks.

Shapes: I input features, O output features.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer import Tolerance, custom_op
from interposer_gguf._block_formats import format_named
from interposer_gguf._cases import gguf_linear_cases, gguf_linear_sample


@custom_op(
    "gguf_linear",
    cases=gguf_linear_cases,
    constants=("weight", "bias", "stored_as"),
    tolerance=Tolerance(roundings=2),
    sample=gguf_linear_sample,
    batched=("x",),
)
def gguf_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stored_as: str
) -> torch.Tensor:
    """Multiply ``x`` by a weight in GGUF blocks, and add the bias if there is one.

    y = x weight^T + bias, where weight = quantized value * scale + offset with the scale and offset
    of each group; computed in float32 or wider.

    Args:
        x: ``[..., I]``, any float dtype.
        weight: ``[O, row]`` uint8, rows of whole blocks as stored in the file.
        bias: ``[O]``, dtype of ``x``, or None.
        stored_as: name of the block format, such as ``q4_k``.
    Returns: ``[..., O]``, dtype of ``x``.
    Raises: UnknownNameError: there is no such format.
    Dims: ``in_features``, ``out_features``, ``stored_as``, ``biased``; ``tied`` if an embedding
        looks up rows of ``weight``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = format_named(stored_as).dequantized(weight, wide)
    offset = None if bias is None else bias.to(wide)
    return functional.linear(x.to(wide), numbers, offset).to(x.dtype)
