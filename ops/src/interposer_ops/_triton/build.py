"""A call that is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from interposer import Dims


@dataclass(frozen=True)
class Build:
    """One call that is compiled.

    Attributes:
        kernel: name of the kernel's record.
        label: what the call is like; unique for its kernel.
        arguments: makes the op's arguments, tensors on the meta device.
        dtype: what a request for such a call states, by torch's name.
        dims: what such a request states besides.
        matrix: whether matrix instructions have to come out.
        without: architectures that the kernel's record refuses, so that nothing is compiled.
    """

    kernel: str
    label: str
    arguments: Callable[[], tuple[Any, ...]]
    dtype: str = "bfloat16"
    dims: Dims = field(default_factory=dict)
    matrix: bool = False
    without: frozenset[str] = frozenset()


def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a dense tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
