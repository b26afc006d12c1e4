"""A kernel call that is compiled ahead of time."""

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
    """One kernel call to compile ahead of time.

    Attributes:
        kernel: name of the kernel's record.
        label: description of the call, unique for the kernel.
        arguments: returns the op's arguments, with tensors on the meta device.
        dtype: dtype of a request for such a call, by torch's name.
        dims: dims of a request for such a call.
        matrix: True if the binary must contain matrix instructions.
        without: architectures that the kernel's record refuses; nothing is compiled for these.
    """

    kernel: str
    label: str
    arguments: Callable[[], tuple[Any, ...]]
    dtype: str = "bfloat16"
    dims: Dims = field(default_factory=dict)
    matrix: bool = False
    without: frozenset[str] = frozenset()


def all_but(*architectures: str) -> frozenset[str]:
    """Return all target architectures except ``architectures``."""
    return _TARGETS.difference(architectures)


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a dense tensor on the meta device, which has no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def given(*values: object) -> Callable[[], tuple[Any, ...]]:
    """Return a function that builds op arguments; ``(dtype, *shape)`` becomes a meta tensor."""

    def argument(value: object) -> object:
        if isinstance(value, tuple) and isinstance(value[0], torch.dtype):
            return meta(*value)
        return value

    return lambda: tuple(map(argument, values))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in requests, such as ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")
