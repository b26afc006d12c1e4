"""Multi-LoRA: every token uses its own low-rank adapter or none.

T tokens, I input features, O output features of the adapters, A adapters, R rank.
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
    """Project each row of ``x`` by the A matrix of its adapter; a row without adapter yields 0.

    y = scale x lora_a[adapter]^T, accumulated and returned in float32 or wider.

    Args:
        x: ``[T, I]``, any float dtype; rows need not be adjacent.
        lora_a: ``[A, R, I]``, dtype of ``x``.
        adapter_ids: ``[T]`` int64, below A, -1 for none.
        scale: factor of the result.
    Returns: ``[T, R]``, float32 or, for wider ``x``, its dtype.
    Dims: in_features, rank, num_adapters.
    Source: arXiv:2106.09685; arXiv:2310.18547 (adapters by row).
    """
    return scale * _project(x, lora_a, adapter_ids)


@_op(
    "lora_expand",
    mutates=("y",),
    constants=("lora_b",),
    batched=("shrunk", "adapter_ids", "y"),
)
def lora_expand(
    shrunk: Tensor, lora_b: Tensor, adapter_ids: Tensor, y: Tensor, offset: int
) -> None:
    """Project each row of ``shrunk`` by the B matrix of its adapter and add to columns of ``y``.

    y[t, offset:offset + O] += shrunk[t] lora_b[adapter]^T, accumulated in float32 or wider. Other
    columns, and rows without an adapter, stay unchanged.

    Args:
        shrunk: ``[T, R]``, float32 or wider, result of ``lora_shrink``; rows need not be adjacent.
        lora_b: ``[A, O, R]``, dtype of ``y``.
        adapter_ids: ``[T]`` int64, below A, -1 for none.
        y: ``[T, at least offset + O]``, any float dtype, updated in place; rows need not be
            adjacent.
        offset: the first column; in a fused linear layer, the first column of one projection.
    Dims: out_features, rank, num_adapters.
    Source: arXiv:2106.09685; arXiv:2310.18547 (adapters by row).
    """
    columns = y[:, offset : offset + lora_b.shape[1]]
    total = columns + _project(shrunk, lora_b, adapter_ids)
    columns.copy_(torch.where((adapter_ids >= 0)[:, None], total.to(y.dtype), columns))


def _project(x: Tensor, matrices: Tensor, adapter_ids: Tensor) -> Tensor:
    """Return x matrices[adapter]^T for every row, zeros for rows without adapter."""
    wide = torch.promote_types(x.dtype, torch.float32)
    result = torch.zeros((x.shape[0], matrices.shape[1]), dtype=wide, device=x.device)
    for adapter in range(matrices.shape[0]):
        projected = x.to(wide) @ matrices[adapter].to(wide).T
        result = torch.where((adapter_ids == adapter)[:, None], projected, result)
    return result
