"""A call that is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interposer import Dims

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E4M3_FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
INT8, INT32, INT64, UINT8 = torch.int8, torch.int32, torch.int64, torch.uint8
_TARGETS = frozenset(
    {
        *("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
        *("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
    }
)


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


def all_but(*architectures: str) -> frozenset[str]:
    """Return the targets that are none of ``architectures``."""
    return _TARGETS.difference(architectures)


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a dense tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def given(*values: object) -> Callable[[], tuple[Any, ...]]:
    """Return what makes these arguments; ``(dtype, *shape)`` stands for a tensor without memory."""

    def made(value: object) -> object:
        if isinstance(value, tuple) and isinstance(value[0], torch.dtype):
            return meta(*value)
        return value

    return lambda: tuple(map(made, values))


def dtype_name(dtype: torch.dtype) -> str:
    """Return what requests call a dtype: float8_e4m3fn."""
    return str(dtype).removeprefix("torch.")
