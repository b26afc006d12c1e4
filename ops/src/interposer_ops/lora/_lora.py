"""Low-rank adapters, of which every token has its own or none.

Dimensions: T tokens, I input features, O output features of the adapters, A adapters, R rank.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op

_op = partial(
    standard_op, cases="interposer_ops.lora._lora_cases", tolerance=Tolerance(roundings=2)
)


@_op(
    "lora_shrink",
    constants=("lora_a",),
    batched=("x", "adapter_ids"),
)
def lora_shrink(x: Tensor, lora_a: Tensor, adapter_ids: Tensor, scale: float) -> Tensor:
    """Project each row of ``x`` by the first matrix of its adapter, zeros where it has none.

    y = scale x lora_a[adapter]^T, accumulated and kept in float32 or wider.

    Args:
        x: ``[T, I]``, any float dtype; rows may skip memory.
        lora_a: ``[A, R, I]``, dtype of ``x``.
        adapter_ids: ``[T]`` int64, below A, -1 for none.
        scale: of the adapters.
    Returns: ``[T, R]``, float32 or, for wider ``x``, its dtype.
    Dims: in_features, rank, num_adapters.
    Source: arXiv:2106.09685; arXiv:2310.18547 (adapters by row).
    """
    return scale * _products(x, lora_a, adapter_ids)


@_op(
    "lora_expand",
    mutates=("y",),
    constants=("lora_b",),
    batched=("shrunk", "adapter_ids", "y"),
)
def lora_expand(
    shrunk: Tensor, lora_b: Tensor, adapter_ids: Tensor, y: Tensor, offset: int
) -> None:
    """Add the product with the second matrix of its adapter to O columns of each row of ``y``.

    y[t, offset:offset + O] += shrunk[t] lora_b[adapter]^T, accumulated in float32 or wider. Other
    columns, and rows without an adapter, stay as they are.

    Args:
        shrunk: ``[T, R]``, float32 or wider, of ``lora_shrink``; rows may skip memory.
        lora_b: ``[A, O, R]``, dtype of ``y``.
        adapter_ids: ``[T]`` int64, below A, -1 for none.
        y: ``[T, at least offset + O]``, any float dtype, written in place; rows may skip memory.
        offset: the first column, as of one projection among several that are fused.
    Dims: out_features, rank, num_adapters.
    Source: arXiv:2106.09685; arXiv:2310.18547 (adapters by row).
    """
    columns = y[:, offset : offset + lora_b.shape[1]]
    total = columns + _products(shrunk, lora_b, adapter_ids)
    columns.copy_(torch.where((adapter_ids >= 0)[:, None], total.to(y.dtype), columns))


def _products(x: Tensor, matrices: Tensor, adapter_ids: Tensor) -> Tensor:
    """Return x matrices[adapter]^T for every row, zeros where there is no adapter."""
    wide = torch.promote_types(x.dtype, torch.float32)
    result = torch.zeros((x.shape[0], matrices.shape[1]), dtype=wide, device=x.device)
    for adapter in range(matrices.shape[0]):
        product = x.to(wide) @ matrices[adapter].to(wide).T
        result = torch.where((adapter_ids == adapter)[:, None], product, result)
    return result
