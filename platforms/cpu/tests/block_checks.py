"""Checks that the tests of native decoder blocks share."""

from typing import Any

import torch


def counted(module: Any) -> list[int]:
    """Return a list that gets an entry whenever ``module`` computes."""
    calls: list[int] = []
    forward = module.forward

    def counting(*inputs: Any) -> Any:
        calls.append(1)
        return forward(*inputs)

    module.forward = counting
    return calls


def assert_same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Compare bits: one call runs the kernels that the parts run, one after another."""
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()
