"""Grouped GEMM as one matmul per group, for any device."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor
from torch.nn import functional

from interposer import Requires
from interposer_ops._declare import standard_kernel


# Opaque: ``tolist`` waits for the group sizes. The reference multiplies all rows by all weights.
@standard_kernel(
    "grouped_linear",
    "in_turn",
    requires=Requires(dtypes=("float32", "bfloat16", "float16")),
    score=3.0,
    properties=frozenset({"deterministic", "opaque"}),
)
def grouped_linear_in_turn(x: Tensor, weight: Tensor, group_starts: Tensor) -> Tensor:
    """Compute ``grouped_linear`` by one call of torch's ``linear`` per group."""
    result = x.new_zeros(x.shape[0], weight.shape[1])
    for matrix, (start, stop) in zip(weight, pairwise(group_starts.tolist()), strict=True):
        if start < stop:
            result[start:stop] = functional.linear(x[start:stop].contiguous(), matrix)
    return result
