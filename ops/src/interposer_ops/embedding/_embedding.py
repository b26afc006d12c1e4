"""Embedding lookups in float, 4-bit and 8-bit tables.

Integer tables have the layout of the weights of ``w4a16_linear`` and ``w8a16_linear``, so that a
tied LM head can use the same memory.

T tokens, V rows of the table, H hidden size, G numbers per scale.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.quantizers._small_floats import unpack_nibbles

_lookup = partial(
    standard_op,
    cases="interposer_ops.embedding._embedding_cases",
    batch_invariant=True,
    batched=("token_ids",),
)
_plain = partial(_lookup, constants=("weight",), tolerance=Tolerance(roundings=0))
_quantized = partial(
    _lookup, constants=("weight", "scale", "zero_points"), tolerance=Tolerance(roundings=1)
)
_DEFAULT_ZERO_POINT = 8  # the middle of the unsigned 4-bit codes


@_plain("embedding")
def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Look up the rows of ``weight`` by ``token_ids``.

    Args:
        token_ids: ``[T]``, int64, each in ``[0, V)``, with any stride.
        weight: ``[V, H]``, any dtype.
    Returns: ``[T, H]``, dtype of ``weight``.
    Dims: vocab_size, hidden_size; tied: True if the LM head uses the same ``weight``, so that a
        kernel may prepare one copy for both.
    """
    return functional.embedding(token_ids, weight)


@_quantized("w4a16_embedding")
def w4a16_embedding(
    token_ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_points: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Look up and dequantize rows of a 4-bit table.

    y = (weight - zero_points) * scale, in float32 or wider and rounded once; G numbers of one row
    share a scale and a zero point.

    Args:
        token_ids: ``[T]``, int64, each in ``[0, V)``, with any stride.
        weight: ``[V, H / 2]`` uint8, two unsigned codes per byte, the code of the first number in
            the low nibble.
        scale: ``[V, H / G]`` float32.
        zero_points: ``[V, H / G]`` uint8 from 0 to 15, not packed; None for 8.
        out_dtype: any float dtype.
    Returns: ``[T, H]``, ``out_dtype``.
    Dims: ``vocab_size``, ``hidden_size``, ``group_size``, ``num_groups``, ``asymmetric``;
        ``tied``, if the LM head uses the same ``weight``.
    """
    quantized = unpack_nibbles(weight[token_ids])
    return _dequantize(token_ids, quantized, scale, zero_points, _DEFAULT_ZERO_POINT, out_dtype)


@_quantized("w8a16_embedding")
def w8a16_embedding(
    token_ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_points: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Look up and dequantize rows of an int8 table.

    y = (weight - zero_points) * scale, in float32 or wider and rounded once; G numbers of one row
    share a scale and a zero point.

    Args:
        token_ids, out_dtype: as in ``w4a16_embedding``.
        weight: ``[V, H]`` int8.
        scale: ``[V, H / G]`` float32; ``[V, 1]`` or ``[V]`` for one scale per row.
        zero_points: ``[V, H / G]`` int8; None for 0.
    Returns: ``[T, H]``, ``out_dtype``.
    Dims: those of ``w4a16_embedding``.
    """
    scales = scale if scale.ndim == 2 else scale.unsqueeze(1)
    return _dequantize(token_ids, weight[token_ids], scales, zero_points, 0, out_dtype)


def _dequantize(
    token_ids: Tensor,
    quantized: Tensor,
    scale: Tensor,
    zero_points: Tensor | None,
    default_zero_point: int,
    out_dtype: torch.dtype,
) -> Tensor:
    wide = torch.promote_types(out_dtype, torch.float32)
    num_groups = scale.shape[1]
    grouped = quantized.to(wide).unflatten(1, (num_groups, quantized.shape[1] // num_groups))
    if zero_points is None:
        grouped = grouped - default_zero_point
    else:
        grouped = grouped - zero_points[token_ids].to(wide).unsqueeze(-1)
    result: Tensor = grouped * scale[token_ids].to(wide).unsqueeze(-1)
    return result.flatten(1).to(out_dtype)
