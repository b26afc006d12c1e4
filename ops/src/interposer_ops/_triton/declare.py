"""Decorator that declares a Triton kernel next to its code; imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from interposer import Dim, Requires
from interposer_ops._declare import standard_kernel

F = TypeVar("F", bound=Callable[..., Any])

FLOATS = ("float32", "bfloat16", "float16")
COPIED = (
    *FLOATS,
    *("float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
"""Dtypes of kernels that copy elements without arithmetic."""

_FEATURES = frozenset({"triton"})
# By construction, the kernels have no atomic adds, sum a row in an order that depends only on the
# row's width, never synchronize, and allocate no memory whose size depends on values.
_PROMISES = frozenset({"deterministic", "graph_safe", "opaque"})


def triton_kernel(
    op: str,
    *,
    technique: str = "triton",
    dtypes: tuple[str, ...] = FLOATS,
    dims: Mapping[str, Dim] | None = None,
    judge: str = "judge",
    score: float = 10.0,
    batch_invariant: bool = True,
) -> Callable[[F], F]:
    """Declare the record of a Triton kernel for ``op``, named ``<op>_<technique>``.

    Args:
        judge: name of the predicate, a function of ``availability``.
        batch_invariant: True if the tile, and so the order of sums, does not depend on the number
            of rows.
    """
    return standard_kernel(
        op,
        technique,
        requires=Requires(_FEATURES, dtypes=dtypes, dims=dims or {}),
        predicate=f"interposer_ops._triton.availability:{judge}",
        score=score,
        properties=_PROMISES | {"batch_invariant"} if batch_invariant else _PROMISES,
    )
