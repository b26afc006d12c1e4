"""The op ``gguf_embedding``: a lookup in an embedding in GGUF blocks.

Shapes: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import torch

from interposer import Tolerance, custom_op
from interposer_gguf._block_formats import format_named
from interposer_gguf._embedding_cases import gguf_embedding_cases, gguf_embedding_sample


@custom_op(
    "gguf_embedding",
    cases=gguf_embedding_cases,
    constants=("weight", "stored_as"),
    tolerance=Tolerance(roundings=1),
    sample=gguf_embedding_sample,
    batched=("token_ids",),
)
def gguf_embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, stored_as: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """Look up rows in GGUF blocks, and dequantize no other rows.

    value = quantized value * scale + offset with the scale and offset of each group, in float32 or
    wider.

    Args:
        token_ids: ``[T]``, int64, each in ``[0, V)``; may be strided.
        weight: ``[V, row]`` uint8, rows of whole blocks as stored in the file.
        stored_as: name of the block format, such as ``q6_k``.
        out_dtype: any float dtype.
    Returns: ``[T, H]``, ``out_dtype``.
    Raises: UnknownNameError: there is no such format.
    Dims: ``vocab_size``, ``hidden_size``, ``stored_as``, ``tied``.
    """
    wide = torch.promote_types(out_dtype, torch.float32)
    return format_named(stored_as).dequantized(weight[token_ids], wide).to(out_dtype)
