"""The products of groups of rows one after the other, for any device."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor
from torch.nn import functional

from interposer import Requires
from interposer_ops._declare import standard_kernel


# It waits for the sizes of groups, where the reference multiplies all rows by all weights.
@standard_kernel(
    "grouped_linear",
    "in_turn",
    requires=Requires(dtypes=("float32", "bfloat16", "float16")),
    score=3.0,
    properties=frozenset({"deterministic", "opaque"}),
)
def grouped_linear_in_turn(x: Tensor, weight: Tensor, group_starts: Tensor) -> Tensor:
    """Compute ``grouped_linear``; each product is that of torch's ``linear``."""
    result = x.new_zeros(x.shape[0], weight.shape[1])
    for matrix, (start, stop) in zip(weight, pairwise(group_starts.tolist()), strict=True):
        if start < stop:
            result[start:stop] = functional.linear(x[start:stop].contiguous(), matrix)
    return result
